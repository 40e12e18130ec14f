"""The tokens that a language model generates: checks of what a user asks for, then sampling or beam search."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any

from xfresearch.data.tokenizers import Tokenizer
from xfresearch.interop import generation
from xfresearch.interop.source import Source as Folder
from xfresearch.models import beams, decoding
from xfresearch.models.context import Source
from xfresearch.models.forced import begun, with_forced
from xfresearch.models.inputs import patches
from xfresearch.models.model_config import LIMITS, ModelConfig, longest_sequence
from xfresearch.models.sampling import Beams, Rules, Sampling, Settings, parts
from xfresearch.models.taps import request
from xfresearch.runtime.errors import UserError


def generated(
    model: ModelConfig,
    params: dict[str, Any],
    tokenizer: Tokenizer,
    tokens: list[list[int]],
    source: Source | None,
    max_new_tokens: int | None,
    how: Sampling | Beams,
    seed: int | list[int],
    replace: Mapping[str, Any],
    prefix: bool = False,
) -> Iterator[list[list[int]]]:
    """The new tokens of every prompt, some at a time; those of a beam search at once. With `prefix`, the tokens of a prompt
    see each other."""
    seeds = seed if isinstance(seed, list) else [seed] * len(tokens)
    if not all(isinstance(each, Integral) and 0 <= each < 2**32 for each in seeds):
        raise UserError(f"seed={seed!r} is not allowed: it must be an integer of at least 0 and below 2^32")
    if len(seeds) != len(tokens):
        raise UserError(f"seed={seed} is not allowed: it must be one number, or one for each of {len(tokens)} prompts")
    if not tokens:
        return iter(())
    top = model.vocab_size - 1
    if (highest := max(map(max, how.rules.bad_words_ids), default=0)) > top:
        raise UserError(f"bad_words_ids: {highest} is not allowed: the model's token ids are 0 to {top}")
    longest = max(map(len, tokens))
    count = _new_tokens(model, longest, max_new_tokens)
    limits: dict[str, Any] = {"stops": tokenizer.stops, "vocab_size": tokenizer.vocab_size}
    limits |= {"source": source, "prefix": prefix}
    if isinstance(how, Beams):
        if replace:
            raise UserError("replace is not allowed with beams: a value of a tap would be that of several beams")
        limits |= {"forced": tokenizer.forced}
        return iter([[best.tokens for best in beams.search(model, params, tokens, count, how, **limits)]])
    tokens, count, first, last = begun(tokenizer.forced, tokens, count)
    sizes = (len(tokens), longest + len(first), *(source.tokens_BS.shape[1:] if source else ()))
    taps = request(model, (), patches(model, replace, *sizes))
    chunks = decoding.generate(model, params, tokens, count, how, seeds, **limits, taps=taps)
    return with_forced(chunks, first, last, tokenizer.stops, len(tokens), count)


def way(source: Folder | None, sampling: Sampling, beams: int, given: Mapping[str, Any]) -> Sampling | Beams:
    """How tokens are chosen: by a search if there is more than one beam. Settings that are not given, or None, are those of
    the model's folder. Raises UserError if tokens are to be sampled in a search, and for its settings without one."""
    if unknown := given.keys() - Settings.__annotations__.keys():
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
    given = {name: value for name, value in given.items() if value is not None}
    rules, search = parts({**generation.settings(source), **given})
    if beams != 1:
        if sampling.temperature:
            raise UserError(f"temperature={sampling.temperature} is not allowed with beams={beams}: it must be 0")
        return Beams(beams, **search, rules=Rules(**rules))
    for name, value in parts(given)[1].items():
        allowed = "it is read only by a beam search, with beams above 1"
        raise UserError(f"{name}={value} is not allowed with beams=1: {allowed}")
    return replace(sampling, rules=Rules(**rules))


def _new_tokens(model: ModelConfig, length: int, max_new_tokens: int | None) -> int:
    """The number of tokens to generate after a prompt of `length` tokens."""
    rows = longest_sequence(model)
    available = rows - length if rows else sys.maxsize
    if available < 1:
        allowed = f"shorter than {rows} tokens, by {LIMITS}"
        raise UserError(f"a prompt of {length} tokens is not allowed: it must be {allowed}")
    count = min(256, available) if max_new_tokens is None else max_new_tokens
    if not (isinstance(count, Integral) and 1 <= count <= available):
        most = f" and at most {available} after a prompt of {length} tokens ({rows} by {LIMITS})" if rows else ""
        raise UserError(f"max_new_tokens={count!r} is not allowed: it must be an integer of at least 1{most}")
    return count
