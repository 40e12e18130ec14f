"""Text generation in batches of prompts of similar length. Each text ends before one of its request's stop strings. Tokens
that the model's settings force (models/forced.py) count among its new ones."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

from xfresearch.interop import generation
from xfresearch.models import decoding
from xfresearch.models.forced import begun, with_forced
from xfresearch.models.sampling import Rules, Sampling, parts
from xfresearch.models.sources import padded
from xfresearch.runtime.errors import UserError
from xfresearch.sharding import placing


class Request(NamedTuple):
    tokens: tuple[int, ...]
    stops: tuple[str, ...]
    max_new_tokens: int
    sampling: tuple = ()  # fields of Sampling; empty: greedy


def make_request(tokens: Sequence[int], settings: dict, length: int) -> Request:
    """The request for lm_eval's normalised `settings`. A long prompt loses its first tokens, so that prompt and answer
    have at most `length` tokens together."""
    max_new_tokens = settings["max_gen_toks"]
    if not 0 < max_new_tokens < length:
        allowed = f"at least 1 and below {length}, the longest sequence that the model reads"
        raise UserError(f"max_gen_toks={max_new_tokens} of a task is not allowed: it must be {allowed}")
    sampling: tuple = ()
    if settings.get("temperature", 0) > 0:  # lm_eval sets 0 if do_sample is False
        sampling = settings["temperature"], settings.get("top_k", 0), settings.get("top_p", 1.0)
    return Request(tuple(tokens[max_new_tokens - length :]), tuple(settings["until"]), max_new_tokens, sampling)


def generate(
    lm, requests: Sequence[Request], batch_size: int, mesh=None, sources: Sequence[list[int]] = ()
) -> Iterator[list[tuple[int, str]]]:
    """Yields, batch by batch, (index, text) of the finished requests. sources: what an encoder reads for each, if there is
    one."""
    groups: dict = {}  # a batch has one number of new tokens and one way of sampling
    for index, request in enumerate(requests):
        groups.setdefault((request.max_new_tokens, request.sampling), []).append(index)
    for (max_new_tokens, sampling), indices in groups.items():
        indices.sort(key=lambda index: -len(requests[index].tokens))
        for first in range(0, len(indices), batch_size):
            batch = indices[first : first + batch_size]
            asked, read = ([of[index] for index in batch if of] for of in (requests, sources))
            texts = complete(lm, asked, max_new_tokens, sampling, seed=first, mesh=mesh, sources=read)
            yield list(zip(batch, texts, strict=True))


def complete(
    lm, requests: list[Request], max_new_tokens: int, sampling: tuple, seed: int, mesh=None, sources: Sequence = ()
) -> list[str]:
    """The text after each prompt, up to the first of its stop strings. Decoding ends once all texts have ended."""
    texts = [""] * len(requests)
    readers = [lm.tokenizer.decode_stream() for _ in requests]
    finished = [False] * len(requests)
    size = placing.round_up(mesh, 1 << (len(requests) - 1).bit_length())  # few sizes: few programs to compile
    asked = [request.tokens for request in islice(cycle(requests), size)]
    prompts, count, first, last = begun(lm.tokenizer.forced, asked, max_new_tokens)
    how = replace(Sampling(*sampling) if sampling else Sampling(temperature=0.0), rules=rules_of(lm))
    limits = {"stops": lm.tokenizer.stops, "vocab_size": lm.tokenizer.vocab_size}
    limits |= {"source": padded([*islice(cycle(sources), size)])} if sources else {}
    chunks = decoding.generate(lm.config, lm.params, prompts, count, how, seed, **limits, mesh=mesh)
    own = (chunk[: len(requests)] for chunk in chunks)  # the rows after are padding
    for chunk in with_forced(own, first, last, lm.tokenizer.stops, len(requests), count):
        for row, (tokens, request) in enumerate(zip(chunk, requests, strict=True)):
            texts[row] += readers[row].push(tokens)
            # A row of a chunk is shorter than the others if it reached the end-of-text token.
            finished[row] |= len(tokens) < max(map(len, chunk)) or truncate(texts[row], request.stops) != texts[row]
        if all(finished):
            break
    texts = [text + reader.flush() for text, reader in zip(texts, readers, strict=True)]
    return [truncate(text, request.stops) for text, request in zip(texts, requests, strict=True)]


def rules_of(lm) -> Rules:
    """The rules of texts in the settings of the model's folder, which HFLM, lm_eval's own adapter, obeys, too."""
    return Rules(**parts(generation.settings(lm.source))[0])


def truncate(text: str, stops: Sequence[str]) -> str:
    """The part of `text` before its first stop string."""
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text
