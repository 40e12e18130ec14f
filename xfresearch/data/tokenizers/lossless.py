"""Which texts a tokenizer returns unchanged: by the steps of its tokenizer.json, and by texts that are easily altered."""

from collections.abc import Iterable

from xfresearch.data.tokenizers.base import Tokenizer

# Spaces of all kinds, controls, texts with several Unicode forms, and scripts that few vocabularies have.
_PROBES = [" ", "  ", " a ", "\t \n", "\r\n", "\x85\u2028", "\u3000", "\ufeff\u200d", "e\u0301 \xe9", "\ufb01\u212b\uff21"]
_PROBES += ["\u1112\u1161 \ud55c", "\u65e5 \u672c", "\u0639\u064e", "\u0939\u093f", "\U0001f999 ", "\U0010fffd ", "_<0x41>"]
_PROBES += [f"a{chr(number)}a" for number in range(256)]


def returns(tokenizer: Tokenizer, texts: Iterable[str] = ()) -> bool:
    """Whether a tokenizer returns `texts` and the probes unchanged, and with lossless='bytes' each byte."""
    whole = [text.encode() for text in (*_PROBES, *texts) if "\u2581" not in text]
    if any(tokenizer.decode(tokenizer.encode(text)).encode() != text for text in whole):
        return False
    single = [bytes([number]) for number in range(256)] if tokenizer.lossless == "bytes" else []
    return all(tokenizer.decode_bytes(tokenizer.encode(byte)) == byte for byte in single)


def by_steps(values: dict, kind: str, byte_level: bool) -> str:
    """`Tokenizer.lossless` of a tokenizer.json with a model of this kind, by the steps around the model: '' unless all of
    them are known to keep all text."""
    model = values["model"]
    steps = [*parts(values.get("normalizer")), *parts(values.get("pre_tokenizer"))]
    subwords = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if kind not in ("BPE", "Unigram") or subwords or not all(map(_is_lossless, steps)):
        return ""
    kinds = {step["type"] for step in steps}
    added = values.get("added_tokens", [])
    if len({token["id"] for token in added}) < len(added):  # one of two texts with the same id is lost
        return ""
    words = [token for token in added if not token["special"]]
    # lstrip and rstrip drop spaces. Prepend would add a space in front of each text between two such tokens.
    if any(token["lstrip"] or token["rstrip"] for token in words) or (words and "Prepend" in kinds):
        return ""
    if byte_level:
        return "bytes" if "ByteLevel" in kinds and not kinds & {"Prepend", "Replace", "Metaspace"} else ""
    # ByteLevel writes bytes as other characters, which a decoder of pieces does not read back.
    return "text" if model.get("byte_fallback") and "ByteLevel" not in kinds else ""


def parts(step: dict | None) -> list[dict]:
    """The steps of a normaliser, pre-tokeniser or post-processor, with sequences flattened."""
    if not step:
        return []
    inner = [one for key in ("normalizers", "pretokenizers", "processors") for one in step.get(key) or ()]
    return [part for one in inner for part in parts(one)] if step["type"] == "Sequence" else [step]


def _is_lossless(step: dict) -> bool:
    """Whether a normaliser or pre-tokeniser is known to keep all text, except that U+2581 becomes a space."""
    known = {
        "ByteLevel": lambda: not step.get("add_prefix_space"),
        "Digits": lambda: True,
        "Split": lambda: step["behavior"] != "Removed",
        "Prepend": lambda: step["prepend"] == "\u2581",
        "Replace": lambda: step["pattern"] == {"String": " "} and step["content"] == "\u2581",
        "Metaspace": lambda: step.get("prepend_scheme") == "never",  # otherwise a leading space of the text is lost
    }
    return step["type"] in known and known[step["type"]]()
