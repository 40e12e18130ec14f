"""The tokens of prompts about a subject: which of them are the subject's, and those of the object that completes it.

The source of a model with an encoder is the prompt, and its target begins with the object: the decoder reads the start id.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xfresearch.analysis.sequences import Sequences
from xfresearch.data.records import Record
from xfresearch.data.subjects import continued
from xfresearch.models.context import Source
from xfresearch.models.inputs import encode
from xfresearch.models.model_config import ModelConfig, check_length
from xfresearch.models.sources import source_of, target_ids
from xfresearch.runtime.errors import UserError

ROUND = 8  # lengths are rounded up to a multiple


class Prompt(NamedTuple):
    tokens: tuple[int, ...]  # of a source with the one that ends it
    first: int  # the first token of the subject
    last: int  # the last one
    target: tuple[int, ...]  # tokens of the object


def prompt_of(lm, record: Record, target: str | None = None) -> Prompt:
    """The tokens of a record's prompt and of `target`, by default the record's. Raises UserError for a text that the
    tokenizer cannot make, or for a target without tokens."""
    tokens = prompt_tokens(lm, record.text)
    joined = b"".join(lm.tokenizer.token_bytes[token] for token in tokens)
    shift = joined.find(record.text.rstrip(" ").encode())
    if shift < 0:
        made = joined.decode(errors="replace")
        raise UserError(f"prompt {record.text!r} is not allowed: the tokenizer makes {made!r} of it")
    start = shift + len(record.prompt.split("{}")[0].encode())
    sizes = np.array([len(lm.tokenizer.token_bytes[token]) for token in tokens])
    ends = np.cumsum(sizes)
    inside = (ends > start) & (ends - sizes < start + len(record.subject.rstrip().encode()))  # not at a space after it
    first, last = np.flatnonzero(inside)[[0, -1]]
    wanted = target_tokens(lm, record.text, record.target if target is None else target)
    return Prompt(tuple(tokens), int(first), int(last), wanted)


def prompt_tokens(lm, text: str) -> list[int]:
    """The tokens of a prompt, without a space at its end, which belongs to the object: of a source, if the model has an
    encoder. Raises UserError for one that is too long."""
    if lm.config.encoder is None:
        return encode(lm.config, lm.tokenizer, text.rstrip(" "), "prompt")
    source = source_of(lm.config, lm.tokenizer, text, 1)
    assert source is not None
    return np.asarray(source.tokens_BS[0]).tolist()


def target_tokens(lm, text: str, target: str) -> tuple[int, ...]:
    """The tokens that continue `text` by `target` (data/subjects.py), or of `target` after a source. Raises UserError if
    there are none."""
    if lm.config.encoder:
        ids = target_ids(lm.config, lm.tokenizer, target)[1:]
        if not ids:
            raise UserError(f"target {target!r} is not allowed: it must have tokens")
        return tuple(ids)
    before = prompt_tokens(lm, text)
    both = encode(lm.config, lm.tokenizer, continued(text, target), "prompt")
    if both[: len(before)] != before or len(both) == len(before) or not target:
        raise UserError(f"target {target!r} is not allowed after {text!r}: it must add tokens to those of the prompt")
    return tuple(both[len(before) :])


def read(lm, prompts: Sequence[Prompt], length: int = 0) -> tuple[Sequences, np.ndarray]:
    """The rows that a model reads before it predicts the objects, padded as `padded` does, and the position of the last
    token of each."""
    tokens_BL, sizes_B = padded([prompt.tokens for prompt in prompts], length), [len(prompt.tokens) for prompt in prompts]
    if lm.config.encoder is None:
        return Sequences(tokens_BL), np.array(sizes_B) - 1
    longest = lm.config.encoder.longest
    if longest and not length:  # padding ends with the table of positions
        tokens_BL = tokens_BL[:, : max(longest, *sizes_B)]
    return after_start(lm.tokenizer, tokens_BL, np.array(sizes_B)), np.zeros(len(prompts), int)


def check_fit(model: ModelConfig, prompts: Sequence[Prompt]) -> None:
    """Raises UserError for a prompt that is longer than the table of positions of the stack that reads it."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    if model.encoder is None:
        check_length(model, longest)
    elif model.encoder.longest and longest > model.encoder.longest:
        allowed = f"at most {model.encoder.longest}, by the encoder's position table"
        raise UserError(f"source of {longest} tokens is not allowed: {allowed}")


def check_asked(lm, text: str, objects: Sequence[str]) -> None:
    """Raises UserError for a prompt that is too long with one of the objects."""
    if lm.config.encoder:
        prompt_tokens(lm, text)
        longest = max(len(target_ids(lm.config, lm.tokenizer, each)) for each in objects)
    else:
        longest = max(len(encode(lm.config, lm.tokenizer, continued(text, each), "prompt")) for each in objects)
    check_length(lm.config, longest)


def after_start(tokenizer, source_BS: np.ndarray, sizes_B: np.ndarray) -> Sequences:
    """Rows in which the decoder reads the start id alone. sizes_B: numbers of tokens of the sources."""
    segments_BS = (np.arange(source_BS.shape[1]) < sizes_B[:, None]).astype(np.int32)
    start_B1 = np.full((len(source_BS), 1), tokenizer.decoder_start, np.int32)
    return Sequences(start_B1, source=Source(source_BS, segments_BS))


def completed(lm, prompts: Sequence[Prompt]) -> tuple[Sequences, np.ndarray]:
    """The rows of prompts with their objects, and bool[N, L]: which tokens are the objects'. Raises UserError for a text
    beyond the model's tables of positions."""
    before, last_N = read(lm, prompts)
    starts_N = np.array(last_N) + 1
    rows = [(*tokens[:start], *each.target) for tokens, start, each in zip(before.tokens_NL, starts_N, prompts, strict=True)]
    check_fit(lm.config, prompts)
    check_length(lm.config, max(map(len, rows)))
    tokens_NL, ends_N = padded(rows), np.array([len(row) for row in rows])
    at_L = np.arange(tokens_NL.shape[1])
    return replace(before, tokens_NL=tokens_NL), (at_L >= starts_N[:, None]) & (at_L < ends_N[:, None])


def padded(rows, length: int = 0) -> np.ndarray:
    """int32[N, L] of sequences of tokens, with zeros at the end. A causal model does not read them. L is `length`, or the
    longest sequence's rounded up to a multiple of ROUND, so that few programs are compiled."""
    length = length or -(-max(map(len, rows)) // ROUND) * ROUND
    tokens_BL = np.zeros((len(rows), length), np.int32)
    for number, row in enumerate(rows):
        tokens_BL[number, : len(row)] = row
    return tokens_BL
