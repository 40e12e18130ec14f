"""A stranger's tokenizer.json: its steps make no text much longer, and its patterns end."""

import base64
import json

import pytest

from tests.data import made_tokenizers as made
from xfresearch.data.tokenizers import bounds, load_tokenizer
from xfresearch.data.tokenizers.bpe import PATTERN
from xfresearch.runtime.errors import UserError

PANIC = "its patterns cannot be used: Onig: Regex search error: retry-limit-in-match over$"


def replace(pattern: str, content: str, kind: str = "String") -> dict:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def normalizers(*steps: dict) -> dict:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def split(*patterns: str) -> dict:
    steps = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, last]}}


def around(pieces: int, ids: int) -> dict:
    piece = {"SpecialToken": {"id": "a", "type_id": 0}}
    special = {"a": {"id": "a", "ids": [0] * ids, "tokens": ["a"] * ids}}
    whole = {"type": "TemplateProcessing", "single": [piece] * pieces, "pair": [], "special_tokens": special}
    return {"post_processor": {"type": "Sequence", "processors": [whole]}}


def precompiled(longest: str) -> dict:
    content = (4).to_bytes(4, "little") + bytes(4) + b"a\0" + longest.encode() + b"\0"
    return normalizers({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()})


def load(tmp_path, changes: dict, whole: str):
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(whole) | changes))
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "changes, message",
    [
        (normalizers(*[replace("a", "a" * 1000)] * 3), r"its normalizer may make 1e\+09 characters of one: .* at most 64$"),
        (normalizers(replace("", "a" * 64)), "may make 65 characters of one"),
        (normalizers(*[replace("b?", "a", "Regex")] * 7), "may make 128 characters of one"),
        (normalizers({"type": "Prepend", "prepend": "a" * 64}), "may make 65 characters of one"),
        (precompiled("a" * 65), "may make 65 characters of one"),
        (around(1025, 1), "its post-processor may put 1,025 ids around a text: it must be at most 1,024$"),
        (around(100_000, 100_000), "may put 10,000,000,000 ids"),
        (split(r"(a+)+b|."), PANIC),
        (split(r"^(([a-z])+.)+[A-Z]([a-z])+$"), PANIC),
        (split(r"\p{N}", r"(\s+\s+)+x"), PANIC),
        (normalizers(replace(r"(z+z+)+y", "b", "Regex")), PANIC),
        # The library reads one of the two lists.
        ({"pre_tokenizer": {"normalizers": [{"type": "NFC"}]} | split(r"(a+)+b|.")["pre_tokenizer"]}, PANIC),
    ],
)  # fmt: skip
def test_steps_without_a_bound_are_refused_in_one_line(tmp_path, changes, message):
    whole = made.byte_fallback() if "normalizer" in changes else made.byte_level()
    with pytest.raises(UserError, match=rf"^{tmp_path}/tokenizer.json: [^\n]*{message}"):
        load(tmp_path, changes, whole)


# GPT-2, GPT-4 and Llama 3, Qwen 2, GPT-4o, DeepSeek V3, this package.
USUAL = [
    [r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    [
        r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    [PATTERN],
]  # fmt: skip


@pytest.mark.parametrize("patterns", USUAL)
def test_the_patterns_of_published_models_are_read(tmp_path, patterns):
    tokenizer = load(tmp_path, split(*patterns), made.byte_level())
    assert tokenizer.decode(tokenizer.encode(b"the a 12  b\n")) == "the a 12  b\n"


@pytest.mark.parametrize("changes", [
    normalizers({"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")),
    normalizers(replace("\n", " \n "), replace(" {2,}", "\u2581", "Regex"), {"type": "NFKC"}, {"type": "Lowercase"}),
    {"normalizer": None},
])  # fmt: skip
def test_usual_normalizers_are_read(tmp_path, changes):
    assert load(tmp_path, changes, made.byte_fallback()).encode(b"the a").size


def test_a_pattern_that_fails_on_a_text_that_was_not_tried_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "_REPEATED", 1)
    tokenizer = load(tmp_path, split(r"(q+)+b|."), made.byte_level())
    assert tokenizer.encode(b"aqb").size
    for call in (tokenizer.encode, lambda text: tokenizer.encode_special(text.decode())):
        with pytest.raises(UserError, match="^the tokenizer cannot read a text: Onig: Regex search error[^\n]*$"):
            call(b"q" * 100)
