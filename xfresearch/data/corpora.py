"""Corpora by name, and the documents of their splits.

A corpus is `NAME` or `NAME:PATH`: python_stdlib, text_files:PATH, tokens:PATH (ids of tokens: token_corpus.py), facts (PATH
is a folder of relation files), wikitext2, enwik8, text8 (PATH is their manual_dir), or any other TFDS data set (PATH is its
data_dir). `PATH` alone, if it exists, is text_files:PATH; a built-in name is never a path. A TFDS data set without a
validation split gets one: 5 % of the documents of the shards of train that sample (corpus_inputs.py), chosen by the hash of
their text.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from xfresearch.data import text_sources
from xfresearch.data.cache import cache_root, digest, locked
from xfresearch.data.corpus_files import names_files
from xfresearch.data.corpus_inputs import LEAST, Input, Shard, TextCorpus, of_splits
from xfresearch.data.given import require_given_corpus
from xfresearch.data.token_corpus import TokenFiles
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.files import check_tree

if TYPE_CHECKING:
    from xfresearch.data.pairs import PairFiles, PairTask

BUILT_IN = ("python_stdlib", "text_files", "tokens", "facts", "wikitext2", "enwik8", "text8")


def documents(corpus: str, split: str, data: DataConfig, tokenizer: Any = None) -> Iterator[bytes]:
    """The documents of `split` as raw bytes, in a fixed order. A corpus of token ids needs the tokenizer that made them.
    Raises UserError for any problem with the data."""
    opened = open_split(corpus, split, data)
    if isinstance(opened, TokenFiles):
        opened.tokenizer = tokenizer
    return opened.documents(split)


def splits(corpus: str, data: DataConfig) -> tuple[str, ...]:
    """The names of the splits of `corpus`."""
    return tuple(open_corpus(corpus, data).splits)


def open_split(corpus: str, split: str, data: DataConfig) -> "Corpus":
    """The corpus, after a check that it has `split`. Raises UserError if it does not."""
    opened = open_corpus(corpus, data)
    if split not in opened.splits:
        known = ", ".join(opened.splits)
        raise UserError(f"corpus {corpus!r} has no split {split!r}; it has: {known}{nearest(split, opened.splits)}")
    return opened


def open_corpus(corpus: str, data: DataConfig) -> "Corpus":
    """The corpus, with `.splits`, `.identity()`, `.documents(split)` and `.n_bytes(split)`, an estimate of the split's size.
    A corpus of text has `.shards` too, one of pairs `.pairs(split)`."""
    if data.objective.kind == "seq2seq":
        from xfresearch.data.pairs import open_pairs

        return open_pairs(corpus, data)
    if data.objective.kind == "chat":
        from xfresearch.data.chat.chat_files import open_conversations

        return open_conversations(corpus, data)
    if corpus not in BUILT_IN:
        require_given_corpus(corpus)
    name, path = _parse(corpus)
    root = cache_root(data)
    if name == "python_stdlib":
        if path:
            raise UserError(
                f"corpus {corpus!r}: python_stdlib takes no path; for your own files write text_files:{path}"
            )
        return BuiltInCorpus(name, text_sources.PythonStdlib(), data)
    if name == "text_files":
        if not path:
            raise UserError("corpus 'text_files' needs a path: text_files:PATH, a file, directory or glob")
        return BuiltInCorpus(name, text_sources.TextFiles(path, data.text_field, data.links), data)
    if name == "tokens":
        return TokenFiles(path, data.links)
    if name == "facts":
        from xfresearch.data.facts import FactSentences

        return BuiltInCorpus(name, FactSentences(path), data)
    if name == "wikitext2":
        return BuiltInCorpus(name, text_sources.Wikitext2(path or data.manual_dir, root), data)
    if name in ("enwik8", "text8"):
        return BuiltInCorpus(name, text_sources.HutterPrize(name, path or data.manual_dir, root), data)
    if path and data.links == "inside":
        check_tree(Path(path).expanduser())
    return TfdsCorpus(corpus, name, path, data.text_field, root / "tfds")


def _parse(corpus: str) -> tuple[str, str]:
    name, _, path = corpus.partition(":")
    if name not in BUILT_IN and names_files(corpus):
        return "text_files", corpus
    version = re.fullmatch(r"(\d+\.\d+\.\d+)(?::(.*))?", path)  # a TFDS version: c4/en:3.1.0
    return (f"{name}:{version[1]}", version[2] or "") if version else (name, path)


class BuiltInCorpus(TextCorpus):
    """A text source of this package (text_sources.py)."""

    def __init__(self, name: str, source, data: DataConfig):
        self.name = name
        self.source = source
        self.splits = source.splits
        self._joined = source.one_stream and data.packing == "stream"

    @cached_property
    def inputs(self) -> list[Input]:
        return self.source.inputs if hasattr(self.source, "inputs") else of_splits(self.source, self.name)

    def identity(self) -> dict:
        return super().identity() | {"joined": self._joined}

    def divide(self, shard: Shard) -> Iterator[tuple[str, bytes]]:
        if not shard.split:
            yield from self.source.divide(shard)
        elif self._joined:
            yield shard.split, b"".join(shard.documents())
        else:
            yield from ((shard.split, text) for text in shard.documents())


class TfdsCorpus(TextCorpus):
    """Any TFDS data set. If it has no validation split, shards of train that sample hold one out by hash."""

    def __init__(self, corpus: str, name: str, data_dir: str, field: str, locks: Path):
        self.corpus = corpus
        self.field = field
        self._builder = _tfds_builder(corpus, name, data_dir)
        if not self._builder.info.splits:
            # Processes prepare it one after another. TFDS does nothing if the data set is already prepared.
            with locked(locks / f"other-{digest(corpus)}"):
                self._prepare()
        stored = list(self._builder.info.splits)
        self.name = self._builder.info.full_name
        self.holds_out = "train" in stored and "validation" not in stored
        self.splits = tuple(stored + ["validation"] if self.holds_out else stored)

    @cached_property
    def inputs(self) -> list[Input]:
        """Consecutive examples of each split, about as many bytes as the smallest shard."""
        return [part for split in self._builder.info.splits for part in self._parts(split)]

    def _parts(self, split: str) -> Iterator[Input]:
        info = self._builder.info.splits[split]
        parts = max(1, int(info.num_bytes) // LEAST)
        version = [self.field, info.num_examples, int(info.num_bytes), str(self._builder.data_path)]
        own = "" if self.holds_out and split == "train" else split
        for number in range(parts):
            first, last = (info.num_examples * at // parts for at in (number, number + 1))
            name, size = f"{self.name} {split}[{first}:{last}]", int(info.num_bytes) // parts
            read = partial(self._read, split, first, last)
            yield Input(name, size, read, lambda: version, partial(digest, [name, version]), own)

    def divide(self, shard: Shard) -> Iterator[tuple[str, bytes]]:
        for text in shard.documents():
            yield shard.split or ("validation" if shard.samples and _is_held_out(text) else "train"), text

    def _read(self, split: str, first: int, last: int) -> Iterator[bytes]:
        source = self._source(split)
        return (self._text(source[number]) for number in range(first, last))

    def _source(self, split: str):
        try:
            return self._builder.as_data_source(split)
        except (NotImplementedError, ValueError) as error:
            raise UserError(f"corpus {self.corpus!r}: its files must be array_record: {_first_line(error)}") from None

    def _text(self, example: dict) -> bytes:
        if self.field not in example:
            present = ", ".join(example)
            raise UserError(
                f"corpus {self.corpus!r}: no field {self.field!r}; fields present: {present}"
                f"{nearest(self.field, example)} (config.data.text_field)"
            )
        text = example[self.field]
        if not isinstance(text, (bytes, str)):
            raise UserError(
                f"corpus {self.corpus!r}: field {self.field!r} is a {type(text).__name__};"
                " it must be text (config.data.text_field)"
            )
        return text.encode() if isinstance(text, str) else text

    def _prepare(self) -> None:
        import tensorflow_datasets as tfds

        config = tfds.download.DownloadConfig(try_download_gcs=False)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                self._builder.download_and_prepare(download_config=config, file_format="array_record")
        except Exception as error:  # TFDS builders raise any type: no network, manual download, no TensorFlow
            raise UserError(
                f"corpus {self.corpus!r}: TFDS cannot prepare it ({type(error).__name__}: {_first_line(error)});"
                f" prepare it elsewhere and give its data_dir: {self.corpus}:PATH"
            ) from None


Corpus: TypeAlias = "TextCorpus | PairFiles | PairTask"


def _tfds_builder(corpus: str, name: str, data_dir: str):
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import naming

    try:
        return tfds.builder(name, data_dir=data_dir or None)
    except (tfds.core.DatasetNotFoundError, ValueError, AssertionError) as error:
        if not isinstance(error, tfds.core.DatasetNotFoundError) and naming.is_valid_dataset_name(name):
            raise UserError(f"corpus {corpus!r}: TFDS cannot open it: {_first_line(error)}") from None
        raise _unknown(corpus, name) from None


def _unknown(corpus: str, name: str) -> UserError:
    from tensorflow_datasets.core import registered

    from xfresearch.data.pairs import TASKS

    listed = registered.list_imported_builders() if hasattr(registered, "list_imported_builders") else []
    if name in TASKS:
        raise UserError(f"corpus {corpus!r} is a task with pairs: it needs data.objective.kind='seq2seq'")
    no_path = "; there is no such file or directory either" if set(corpus) & set("./~*?") else ""
    return UserError(
        f"unknown corpus {corpus!r}; it must be {', '.join(BUILT_IN)}, a TFDS data set or an existing path"
        f"{nearest(name, [*BUILT_IN, *listed])}{no_path}"
    )


def _is_held_out(text: bytes) -> bool:
    return text_sources.split_of(text) == "validation"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
