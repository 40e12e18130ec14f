"""What is known of the Hugging Face folder that a model came from, so that export writes the same one again."""

import json
from dataclasses import dataclass
from pathlib import Path

from xfresearch.errors import UserError

FILE = "huggingface.json"  # beside the config.json of a run; the folder's files but for its weights are in FILES
FILES = "huggingface"
SUFFIXES = (".json", ".txt", ".model", ".jinja", ".bpe")  # config.json, tokenizers, templates of chats


@dataclass(frozen=True)
class Source:
    """`tokenizer` is the digest of the one that `files` hold, by which it is known again; '' where there is none."""

    config: dict
    dtype: str  # of most tensors
    dtypes: dict[str, str]  # of the others, by name
    bare: bool  # whether names lack the family's prefix
    tokenizer: str
    files: dict[str, bytes]  # as they are, all but config.json and the weights

    def save(self, directory: Path) -> None:
        """Writes what `load` reads."""
        (directory / FILES).mkdir()
        for name, content in self.files.items():
            (directory / FILES / name).write_bytes(content)
        known = {name: value for name, value in vars(self).items() if name != "files"}
        (directory / FILE).write_text(json.dumps(known, indent=2) + "\n")


def load(directory: Path) -> Source | None:
    """The source of a model that was saved in `directory`; None where it came from no folder."""
    file = directory / FILE
    if not file.is_file():
        return None
    try:
        return Source(**json.loads(file.read_text()), files=small_files(directory / FILES))
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"{file}: not what a model's source was saved as: {error}") from None


def small_files(folder: Path) -> dict[str, bytes]:
    """The content of every file of a folder but config.json and the weights with their index."""
    return {
        file.name: file.read_bytes()
        for file in sorted(folder.iterdir())
        if file.suffix in SUFFIXES
        and file.is_file()
        and not file.name.endswith(".index.json")
        and file.name != "config.json"
    }
