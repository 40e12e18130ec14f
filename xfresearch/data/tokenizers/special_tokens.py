"""Special tokens, as the settings files of a Hugging Face directory define them."""

import json
from dataclasses import dataclass, field

from etils import epath

from xfresearch.runtime.files import exists, inside, read_bytes, read_object

SETTINGS = "tokenizer_config.json"
_NAME_FILES = ("special_tokens_map.json", SETTINGS)  # the second overrides the first
_ID_FILES = ("generation_config.json", "config.json")  # the first that defines eos_token_id counts
MOST_SENTINELS = 1 << 16
TEMPLATES = ("chat_template.jinja", "chat_template.json")  # of conversations: they change no text's tokens
FILES = (*_NAME_FILES, _ID_FILES[0], *TEMPLATES)  # that are saved


@dataclass(frozen=True)
class SpecialTokens:
    """`begin` and `end` are token names, '' if no file defines them. `files` are saved together with the tokenizer."""

    begin: str = ""
    adds_begin: bool = False  # used only for tokenizer files that cannot define it themselves
    end: str = ""
    stops: tuple[int, ...] = ()
    decoder_start: int | None = None  # what the decoder of a model with an encoder reads first
    forced: tuple[int | None, int | None] = (None, None)  # the first and the last token of every generated text (BART)
    sentinels: int = 0  # of T5, which follow the pieces of a SentencePiece .model
    kind: str = ""  # the tokenizer class in `transformers`, without "Fast"
    files: dict[str, bytes] = field(default_factory=dict)


NO_SPECIAL_TOKENS = SpecialTokens()


def read(directory: epath.Path) -> SpecialTokens:
    """Reads the settings files in `directory`. Raises UserError if one is not a JSON object."""
    files = {name: read_bytes(inside(directory, name)) for name in _NAME_FILES if exists(directory / name)}
    values: dict = {}
    for name in files:
        values |= {key: value for key, value in read_object(inside(directory, name)).items() if value is not None}
    templates = {name: read_bytes(inside(directory, name)) for name in TEMPLATES if exists(directory / name)}
    stops = next(filter(None, (_stops(inside(directory, name)) for name in _ID_FILES)), ())
    names = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
    found = {name: _id(directory, name) for name in names}
    ids: dict[str, object] = {"eos_token_id": stops} if stops else {}
    ids |= {name: value for name, value in found.items() if value is not None}
    if ids:  # saves these keys only: the other settings do not belong to the tokenizer
        files["generation_config.json"] = json.dumps(ids).encode() + b"\n"
    sentinels = _sentinels(values)
    if sentinels is None:  # config.json, which may say so, is not saved
        sentinels = 100 if _is_t5(inside(directory, "config.json")) else 0
        settings = read_object(inside(directory, SETTINGS)) if SETTINGS in files else {}
        files |= {SETTINGS: json.dumps(settings | {"extra_ids": sentinels}).encode() + b"\n"} if sentinels else {}
    adds_begin = values.get("add_bos_token") is True
    kind = str(values.get("tokenizer_class", "")).removesuffix("Fast")
    begin, end = (name_of(values.get(name)) for name in ("bos_token", "eos_token"))
    start, first, last = found.values()
    return SpecialTokens(begin, adds_begin, end, stops, start, (first, last), sentinels, kind, files | templates)


def name_of(token) -> str:
    """The name of a token, which the files store as a string or as an object with the key "content"."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _sentinels(values: dict) -> int | None:
    """The number of T5's sentinels: as a number, as names, or 100 for T5's tokenizer. None if the settings have none."""
    listed = values.get("additional_special_tokens")
    names = [name_of(token) for token in listed] if isinstance(listed, list) else []
    named = sum(name.startswith("<extra_id_") for name in names)
    usual = 100 if str(values.get("tokenizer_class", "")).startswith("T5Tokenizer") else None
    count = values.get("extra_ids", named or usual)
    return min(max(count, 0), MOST_SENTINELS) if type(count) is int else None


def _is_t5(config: epath.Path) -> bool:
    return exists(config) and read_object(config).get("model_type") == "t5"


def _stops(path: epath.Path) -> tuple[int, ...]:
    ids = read_object(path).get("eos_token_id") if exists(path) else None
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(i for i in ids if type(i) is int)  # `type`, because isinstance(True, int) is true


def _id(directory: epath.Path, key: str) -> int | None:
    """The id of a key, in the first of the files that has one."""
    paths = (inside(directory, name) for name in _ID_FILES)
    values = (read_object(path).get(key) for path in paths if exists(path))
    return next((value for value in values if type(value) is int), None)
