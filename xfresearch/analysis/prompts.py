"""The tokens of prompts about a subject: which of them are the subject's, and those of the object that completes it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xfresearch.data.records import Record
from xfresearch.models.inputs import encode
from xfresearch.runtime.errors import UserError

ROUND = 8  # lengths are rounded up to a multiple


class Prompt(NamedTuple):
    tokens: tuple[int, ...]
    first: int  # the first token of the subject
    last: int  # the last one
    target: tuple[int, ...]  # tokens of the object


def prompt_of(lm, record: Record, target: str | None = None) -> Prompt:
    """The tokens of a record's prompt and of `target`, by default the record's. Raises UserError for a text that the
    tokenizer cannot make, or for a target without tokens."""
    tokens = encode(lm.config, lm.tokenizer, record.text, "prompt")
    joined = b"".join(lm.tokenizer.token_bytes[token] for token in tokens)
    shift = joined.find(record.text.encode())
    if shift < 0:
        made = joined.decode(errors="replace")
        raise UserError(f"prompt {record.text!r} is not allowed: the tokenizer makes {made!r} of it")
    start = shift + len(record.prompt.split("{}")[0].encode())
    sizes = np.array([len(lm.tokenizer.token_bytes[token]) for token in tokens])
    ends = np.cumsum(sizes)
    inside = (ends > start) & (ends - sizes < start + len(record.subject.encode()))
    first, last = np.flatnonzero(inside)[[0, -1]]
    wanted = target_tokens(lm, record.text, record.target if target is None else target)
    return Prompt(tuple(tokens), int(first), int(last), wanted)


def target_tokens(lm, text: str, target: str) -> tuple[int, ...]:
    """The tokens that continue `text` by a space and `target`. Raises UserError if there are none."""
    before = encode(lm.config, lm.tokenizer, text, "prompt")
    both = encode(lm.config, lm.tokenizer, f"{text} {target.strip()}", "prompt")
    if both[: len(before)] != before or len(both) == len(before) or not target.strip():
        raise UserError(f"target {target!r} is not allowed after {text!r}: it must add tokens to those of the prompt")
    return tuple(both[len(before) :])


def completed(prompts: Sequence[Prompt]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32[N, L] of prompts with their objects, and bool[N, L]: which are the objects'."""
    rows = [(*prompt.tokens, *prompt.target) for prompt in prompts]
    tokens_NL = padded(rows)
    starts, ends = ([len(row) for row in each] for each in ([prompt.tokens for prompt in prompts], rows))
    at_L = np.arange(tokens_NL.shape[1])
    return tokens_NL, (at_L >= np.array(starts)[:, None]) & (at_L < np.array(ends)[:, None])


def padded(rows, length: int = 0) -> np.ndarray:
    """int32[N, L] of sequences of tokens, with zeros at the end. A causal model does not read them. L is `length`, or the
    longest sequence's rounded up to a multiple of ROUND, so that few programs are compiled."""
    length = length or -(-max(map(len, rows)) // ROUND) * ROUND
    tokens_BL = np.zeros((len(rows), length), np.int32)
    for number, row in enumerate(rows):
        tokens_BL[number, : len(row)] = row
    return tokens_BL
