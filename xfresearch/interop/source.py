"""Record of the Hugging Face folder that a model was imported from, so that export can reproduce it."""

import json
from dataclasses import dataclass
from pathlib import Path

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import (
    exists,
    files_in,
    inside,
    read_bytes,
    read_object,
    remove,
    remove_files,
    write_bytes,
    write_text,
)
from xfresearch.runtime.schema import ANY, check

FILE = "huggingface.json"  # in the run's directory
FILES = "huggingface"  # next to FILE: the folder's other files (NAMES)
# The files that belong to a model: tokenizers, chat templates, sampling settings. Others may be anything.
NAMES: tuple[str, ...] = ("bytes.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
NAMES += ("added_tokens.json",)
NAMES += ("vocab.json", "merges.txt", "vocab.txt", "encoder.json", "vocab.bpe", "chat_template.jinja", "chat_template.json")
NAMES += ("generation_config.json", "preprocessor_config.json", "processor_config.json")
RECORD = {"config": dict, "dtype": str, "dtypes": {ANY: str}, "bare": bool, "tokenizer": str}


@dataclass(frozen=True)
class Source:
    """The parts of a Hugging Face folder that the model's config and parameters do not contain."""

    config: dict  # config.json
    dtype: str  # of most tensors
    dtypes: dict[str, str]  # of the other tensors, by name
    bare: bool  # whether tensor names lack the family's prefix
    tokenizer: str  # digest of the tokenizer in `files`, '' if there is none
    files: dict[str, bytes]  # contents of the files of NAMES, and of SentencePiece models

    def save(self, directory: Path) -> None:
        """Writes the record, for `load`."""
        for name, content in self.files.items():
            write_bytes(inside(directory, FILES, name), content)
        known = {name: value for name, value in vars(self).items() if name != "files"}
        write_text(directory / FILE, json.dumps(known, indent=2) + "\n")


def replace(directory: Path, source: Source | None) -> None:
    """Writes the record of `source` in place of one that may be there; without a source, there is none afterwards."""
    kept = source.files if source else {}
    remove_files(directory, FILES, wrote=lambda name: is_kept(name) and name not in kept)
    if source:
        source.save(directory)
    elif exists(record := inside(directory, FILE)):
        remove(record)


def load(directory: Path) -> Source | None:
    """The source of the model saved in `directory`; None if it was not imported from a Hugging Face folder."""
    file = inside(directory, FILE)
    if not exists(file):
        return None
    try:
        known = check(read_object(file), RECORD, file)
        return Source(**{name: known[name] for name in RECORD}, files=small_files(directory, FILES))
    except OSError as error:
        raise UserError(f"{file}: not a valid record of a Hugging Face folder: {error}") from None


def small_files(*folder) -> dict[str, bytes]:
    """{name: content} of the files that belong to the model, except config.json and the weights. The folder is given as the
    arguments of files.inside."""
    files = files_in(*folder)
    return {file.name: read_bytes(file) for file in files if is_kept(file.name)}


def is_kept(name: str) -> bool:
    """Whether a file of this name belongs to the model."""
    return name in NAMES or name.endswith(".model")
