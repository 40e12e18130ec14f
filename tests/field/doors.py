"""The doors of the table: what reads a file, as a command does, and the figure that it gives. Each returns one line."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from xfresearch.options.run_options import DataConfig


def documents(texts: Iterable[bytes]) -> str:
    """'6 documents 0123456789ab': the digest is of the documents in the order of their bytes."""
    texts = sorted(texts)
    return f"{len(texts)} documents {hashlib.sha256(b'|'.join(texts)).hexdigest()[:12]}"


def corpus(path: Path, field: str) -> str:
    """The documents of config.data.corpus=PATH with config.data.text_field=FIELD."""
    from xfresearch.data.corpora import open_corpus
    from xfresearch.data.corpus_files import read_documents

    files = open_corpus(str(path), DataConfig(text_field=field or "text")).source.files
    return documents(text for file in files for text in read_documents(file, field or "text"))


def pairs(path: Path, fields: str) -> str:
    """The pairs of config.data.corpus=PATH with the source and the target in two fields, joined by a tab. A number of a
    column is given as one, as in a config file."""
    from xfresearch.data.pairs import PairFiles, open_pairs
    from xfresearch.options.reading import from_dict
    from xfresearch.run_config.config_files import default_config

    data = default_config().data
    data.objective.kind = "seq2seq"
    source, target = (int(field) if field.isdecimal() else field for field in fields.split())
    data.objective.source_field, data.objective.target_field = source, target
    files = open_pairs(str(path), from_dict(DataConfig, data, "config.data"))
    assert isinstance(files, PairFiles)
    return documents(b"\t".join(pair) for split in files.splits for pair in files.pairs(split)).replace("documents", "pairs")


def tokenizer(path: Path, text: str) -> str:
    """The ids of a text."""
    from xfresearch.data.tokenizers import load_tokenizer

    return " ".join(map(str, load_tokenizer(path).encode(text.encode())))


def model(path: Path, source: str) -> str:
    """The mean of the absolute logits of the tokens 1 2 3, after a source such as '4 5' if the model has an encoder."""
    import numpy as np

    import xfresearch as xf
    from xfresearch.models.sources import padded

    given = {"source": padded([[int(token) for token in source.split()]])} if source else {}
    return f"logits {np.abs(xf.load(path)([[1, 2, 3]], **given)).mean():.5f}"


def summary(path: Path, source: str) -> str:
    """The tokens that a search with three beams finds for a source, with the settings of the folder."""
    import xfresearch as xf

    found: list[int] = []
    how = {"beams": 3, "temperature": 0.0, "max_new_tokens": 12}
    xf.load(path).generate(source=[[*source.encode()]], **how, stream=lambda row, text, new: found.extend(new))
    return " ".join(map(str, found))


def chat(path: Path, _: str) -> str:
    """The text of two messages by the chat template."""
    from xfresearch.data.chat.templates import render

    messages = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]
    return render({"chat_template.jinja": path.read_bytes()}, messages)


def requests(path: Path, _: str) -> str:
    """The records of `edit --request FILE`: the first one, and how many there are of each of its prompts."""
    from xfresearch.data.records import read_records

    first, *more = read_records(path)
    counts = " ".join(f"{len(getattr(first, name))} {name}" for name in ("paraphrases", "neighbours", "consequences"))
    return f"{1 + len(more)} records {first.prompt!r} {first.subject}: {first.target} to {first.target_new}, {counts}"


def edit(path: Path, _: str) -> str:
    """What an edit reads of the first record: the bytes of the prompt, and those of the new object."""
    from tests.tiny_runs import tiny_model
    from xfresearch.analysis.prompts import prompt_of
    from xfresearch.data.records import read_records

    record = read_records(path)[0]
    prompt = prompt_of(tiny_model("gpt2"), record, record.target_new)
    return f"{bytes(prompt.tokens).decode()!r} {bytes(prompt.target).decode()!r}"


DOORS: dict[str, Callable[[Path, str], str]] = {
    "corpus": corpus,
    "pairs": pairs,
    "tokenizer": tokenizer,
    "model": model,
    "summary": summary,
    "chat": chat,
    "requests": requests,
    "edit": edit,
}
