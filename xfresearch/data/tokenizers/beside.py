"""What the files beside a tokenizer in a Hugging Face folder say of its special tokens."""

import json
from dataclasses import dataclass, field

from etils import epath

from xfresearch.errors import UserError

_NAMED = ("special_tokens_map.json", "tokenizer_config.json")  # the later one's word counts
_NUMBERED = ("generation_config.json", "config.json")  # the first one's that has any


@dataclass(frozen=True)
class Beside:
    """`begin` and `end` are tokens by name, '' where no file says; `files` are what the tokenizer is saved with."""

    begin: str = ""
    adds_begin: bool = False  # asked only where the tokenizer's own file cannot say it
    end: str = ""
    stops: tuple[int, ...] = ()
    kind: str = ""  # the class that transformers reads it with, without "Fast"
    files: dict[str, bytes] = field(default_factory=dict)


NOTHING = Beside()


def read(directory: epath.Path) -> Beside:
    """What the files in `directory` say; UserError for one that is not a JSON object."""
    files = {name: (directory / name).read_bytes() for name in _NAMED if (directory / name).is_file()}
    said = {}
    for name in files:
        said |= {key: value for key, value in _read(directory / name).items() if value is not None}
    stops = next(filter(None, (_stops(directory / name) for name in _NUMBERED)), ())
    if stops:  # alone: the folder's other settings are not the tokenizer's
        files["generation_config.json"] = json.dumps({"eos_token_id": stops}).encode() + b"\n"
    adds_begin = said.get("add_bos_token") is True
    kind = str(said.get("tokenizer_class", "")).removesuffix("Fast")
    return Beside(_name(said.get("bos_token")), adds_begin, _name(said.get("eos_token")), stops, kind, files)


def _read(path: epath.Path) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: invalid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a JSON {type(values).__name__}; it must be an object")
    return values


def _name(token) -> str:
    """A token is written as its text, or as an object with it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _stops(path: epath.Path) -> tuple[int, ...]:
    ids = _read(path).get("eos_token_id") if path.is_file() else None
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(i for i in ids if type(i) is int)  # not True, which is one too
