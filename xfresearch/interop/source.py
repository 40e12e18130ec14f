"""Record of the Hugging Face folder that a model was imported from, so that export can reproduce it."""

import json
from dataclasses import dataclass
from pathlib import Path

from xfresearch.errors import UserError

FILE = "huggingface.json"  # in the run's directory
FILES = "huggingface"  # next to FILE: the folder's files except config.json and weights
SUFFIXES = (".json", ".txt", ".model", ".jinja", ".bpe")  # config.json, tokenizers, chat templates


@dataclass(frozen=True)
class Source:
    """The parts of a Hugging Face folder that the model's config and parameters do not contain."""

    config: dict  # config.json
    dtype: str  # of most tensors
    dtypes: dict[str, str]  # of the other tensors, by name
    bare: bool  # whether tensor names lack the family's prefix
    tokenizer: str  # digest of the tokenizer in `files`, '' if there is none
    files: dict[str, bytes]  # contents of all files except config.json and weights

    def save(self, directory: Path) -> None:
        """Writes the record, for `load`."""
        (directory / FILES).mkdir()
        for name, content in self.files.items():
            (directory / FILES / name).write_bytes(content)
        known = {name: value for name, value in vars(self).items() if name != "files"}
        (directory / FILE).write_text(json.dumps(known, indent=2) + "\n")


def load(directory: Path) -> Source | None:
    """The source of the model saved in `directory`; None if it was not imported from a Hugging Face folder."""
    file = directory / FILE
    if not file.is_file():
        return None
    try:
        return Source(**json.loads(file.read_text()), files=small_files(directory / FILES))
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"{file}: not a valid record of a Hugging Face folder: {error}") from None


def small_files(folder: Path) -> dict[str, bytes]:
    """{name: content} of a folder's files, without config.json, the weights and their index."""
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir())
        if file.suffix in SUFFIXES
        and file.is_file()
        and not file.name.endswith(".index.json")
        and file.name != "config.json"
    }
