"""What the steps of a stranger's tokenizer.json may make of a text: how much longer it may grow, and in which time."""

import base64
import json
import math
import re

from xfresearch.data.tokenizers.lossless import parts
from xfresearch.runtime import confined
from xfresearch.runtime.errors import UserError

MOST = 64  # characters that the steps may make of one; NFKC makes 18 of U+FDFA
MOST_AROUND = 1 << 10  # ids that the post-processor may put around a text
SECONDS, MEMORY = 3, 1 << 28  # of processor time, and bytes, to try the patterns
_REPEATED, _CHARACTERS = 2000, 64  # characters of a text that patterns are tried on, and how many of them
_USUAL = "aA0 \n.\u00e9\u4e2d"


def require_bounded(values: dict) -> None:
    """Raises UserError if the steps of a tokenizer.json may make more than MOST characters of one, or put more than
    MOST_AROUND ids around a text, or if its patterns fail, or take long, on a text of one character many times."""
    steps = {key: values.get(key) for key in ("normalizer", "pre_tokenizer")}
    flat = [part for step in steps.values() for part in parts(step)]
    growth, around = math.prod(map(_growth, flat)), sum(map(_around, parts(values.get("post_processor"))))
    if growth > MOST:
        raise UserError(f"its normalizer may make {growth:.3g} characters of one: it must make at most {MOST}")
    if around > MOST_AROUND:
        raise UserError(f"its post-processor may put {around:,} ids around a text: it must be at most {MOST_AROUND:,}")
    patterns = "".join(filter(None, map(_pattern, flat)))
    if patterns:
        characters = list(dict.fromkeys(_USUAL + "".join(re.findall(r"\w", patterns))))[:_CHARACTERS]
        ends = "", "!" + "".join(reversed(characters))  # a pattern is not tried on a text that lacks one of its characters
        _try(steps, [character * _REPEATED + end for character in characters for end in ends])


def _try(steps: dict, texts: list[str]) -> None:
    request = json.dumps({"steps": steps, "texts": texts}).encode()
    try:
        list(confined.ask("xfresearch.data.pattern_trial", request, SECONDS, MEMORY))
    except confined.Failed as error:
        raise UserError(f"its patterns cannot be used: {error}") from None


def _growth(step: dict) -> float:
    """How many characters a step may make of one."""
    kind = step["type"]
    if kind == "Precompiled":
        return _longest(step["precompiled_charsmap"])
    if kind == "Prepend":  # before each part of a text between two special tokens
        return 1 + len(step["prepend"])
    if kind != "Replace":
        return 1
    replaced, content = step["pattern"].get("String"), len(step["content"])
    return max(1, content / len(replaced)) if replaced else 1 + content  # a pattern may match no character


def _around(step: dict) -> int:
    longest = max((len(token["ids"]) for token in (step.get("special_tokens") or {}).values()), default=0)
    return longest * max(len(step.get("single") or ()), len(step.get("pair") or ()))


def _pattern(step: dict) -> str | None:
    pattern = step.get("pattern")
    return pattern.get("Regex") if isinstance(pattern, dict) else None


def _longest(charsmap: str) -> int:
    """Characters of the longest text in SentencePiece's map: the size of a trie, the trie, texts that end with a zero."""
    content = base64.b64decode(charsmap or "")
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))
