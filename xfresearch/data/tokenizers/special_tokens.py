"""Special tokens, as the settings files of a Hugging Face directory define them."""

import json
from dataclasses import dataclass, field

from etils import epath

from xfresearch.runtime.files import exists, inside, read_bytes, read_object

_NAME_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the second overrides the first
_ID_FILES = ("generation_config.json", "config.json")  # the first that defines eos_token_id counts
FILES = (*_NAME_FILES, _ID_FILES[0])  # that are saved


@dataclass(frozen=True)
class SpecialTokens:
    """`begin` and `end` are token names, '' if no file defines them. `files` are saved together with the tokenizer."""

    begin: str = ""
    adds_begin: bool = False  # used only for tokenizer files that cannot define it themselves
    end: str = ""
    stops: tuple[int, ...] = ()
    decoder_start: int | None = None  # what the decoder of a model with an encoder reads first
    kind: str = ""  # the tokenizer class in `transformers`, without "Fast"
    files: dict[str, bytes] = field(default_factory=dict)


NO_SPECIAL_TOKENS = SpecialTokens()


def read(directory: epath.Path) -> SpecialTokens:
    """Reads the settings files in `directory`. Raises UserError if one is not a JSON object."""
    files = {name: read_bytes(inside(directory, name)) for name in _NAME_FILES if exists(directory / name)}
    values: dict = {}
    for name in files:
        values |= {key: value for key, value in read_object(inside(directory, name)).items() if value is not None}
    stops = next(filter(None, (_stops(inside(directory, name)) for name in _ID_FILES)), ())
    start = next((found for name in _ID_FILES if (found := _decoder_start(inside(directory, name))) is not None), None)
    ids: dict[str, object] = {"eos_token_id": stops} if stops else {}
    ids |= {} if start is None else {"decoder_start_token_id": start}
    if ids:  # saves these keys only: the other settings do not belong to the tokenizer
        files["generation_config.json"] = json.dumps(ids).encode() + b"\n"
    adds_begin = values.get("add_bos_token") is True
    kind = str(values.get("tokenizer_class", "")).removesuffix("Fast")
    begin, end = (_name(values.get(name)) for name in ("bos_token", "eos_token"))
    return SpecialTokens(begin, adds_begin, end, stops, start, kind, files)


def _name(token) -> str:
    """The name of a token, which the files store as a string or as an object with the key "content"."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _stops(path: epath.Path) -> tuple[int, ...]:
    ids = read_object(path).get("eos_token_id") if exists(path) else None
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(i for i in ids if type(i) is int)  # `type`, because isinstance(True, int) is true


def _decoder_start(path: epath.Path) -> int | None:
    found = read_object(path).get("decoder_start_token_id") if exists(path) else None
    return found if type(found) is int else None
