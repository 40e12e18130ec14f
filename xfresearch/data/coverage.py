"""How much of a text its tokens give back. An unknown token has no text, and some tokenizers alter texts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from xfresearch.data.tokenizers import Tokenizer

MOST_UNKNOWN, MOST_LOST = 0.01, 0.1  # shares above which a run begins with a warning


def counts(tokenizer: Tokenizer, text: bytes, ids: np.ndarray) -> dict[str, int]:
    """n_unknown, the unknown tokens among the `ids` of a text, and n_lost, the bytes of the text that are not among those of
    its tokens. Bytes are counted by their values, in any order."""
    unknown = 0 if tokenizer.unknown is None else np.count_nonzero(ids == tokenizer.unknown)
    if tokenizer.lossless or (made := tokenizer.decode(ids.tolist()).encode()) == text:
        return {"n_unknown": int(unknown), "n_lost": 0}
    before, after = (np.bincount(np.frombuffer(each, np.uint8), minlength=256) for each in (text, made))
    return {"n_unknown": int(unknown), "n_lost": int(np.maximum(before - after, 0).sum())}


def shares(meta: Mapping[str, Any]) -> dict[str, float]:
    """The shares of unknown tokens and of lost bytes, by the meta of a prepared split; {} if there are none."""
    unknown, lost = meta.get("n_unknown", 0), meta.get("n_lost", 0)
    if not unknown and not lost:
        return {}
    return {"unknown_tokens": unknown / meta["n_tokens"], "lost_bytes": lost / max(meta["n_bytes"], 1)}


def words(known: Mapping[str, Any]) -> str:
    """'51.2% of the tokens are unknown, 60.9% of the text does not come back' of `shares`; '' if all of it does."""
    if "lost_bytes" not in known:
        return ""
    unknown, lost = known["unknown_tokens"], known["lost_bytes"]
    return f"{unknown:.1%} of the tokens are unknown, {lost:.1%} of the text does not come back"


def note(evaluation: Mapping[str, Any]) -> str:
    """The sentence on the bits per byte of an evaluation (losses.summary) of text; '' if all of it comes back."""
    if not words(evaluation) or "perplexity" not in evaluation:
        return ""
    rest = "bits per byte are over the rest" if "bits_per_byte" in evaluation else "so it has no bits per byte"
    return f"{words(evaluation)}: {rest}"


def warning(name: str, meta: Mapping[str, Any]) -> list[str]:
    """A warning of a split with too many of either."""
    known = shares(meta)
    if not known or known["unknown_tokens"] < MOST_UNKNOWN and known["lost_bytes"] < MOST_LOST:
        return []
    return [f"{name}: {words(known)}: config.data.tokenizer=bytes or bpe keeps all of it"]
