"""Texts after prompts, each up to one of its own stop strings, batched by length."""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple

from xfresearch.errors import UserError
from xfresearch.models import decoding
from xfresearch.sharding import placing


class Request(NamedTuple):
    tokens: tuple[int, ...]
    until: tuple[str, ...]
    most: int  # new tokens
    sampling: tuple = ()  # fields of decoding.Sampling; empty: greedy


def request_of(tokens: Sequence[int], settings: dict, length: int) -> Request:
    """What lm_eval's normalised `settings` ask for; the prompt is cut on the left to leave room for the answer."""
    most = settings["max_gen_toks"]
    if not 0 < most < length:
        allowed = f"it must be at least 1 and leave room for a prompt in the {length} tokens that the model reads"
        raise UserError(f"max_gen_toks={most} of a task is not allowed: {allowed}")
    sampling = ()
    if settings.get("temperature", 0) > 0:  # 0 wherever do_sample is False
        sampling = settings["temperature"], settings.get("top_k", 0), settings.get("top_p", 1.0)
    return Request(tuple(tokens[most - length :]), tuple(settings["until"]), most, sampling)


def generate(lm, requests: Sequence[Request], batch_size: int, mesh=None) -> Iterator[list[tuple[int, str]]]:
    """Yields, batch by batch, (number, text) of the requests that are done."""
    alike = {}
    for number, request in enumerate(requests):
        alike.setdefault((request.most, request.sampling), []).append(number)
    for (most, sampling), numbers in alike.items():
        numbers.sort(key=lambda number: -len(requests[number].tokens))
        for first in range(0, len(numbers), batch_size):
            part = numbers[first : first + batch_size]
            texts = complete(lm, [requests[number] for number in part], most, sampling, seed=first, mesh=mesh)
            yield list(zip(part, texts, strict=True))


def complete(lm, requests: list[Request], most: int, sampling: tuple, seed: int, mesh=None) -> list[str]:
    """The text after each prompt, cut before the first of its stop strings; none is awaited longer than that."""
    texts, readers = [""] * len(requests), [lm.tokenizer.decode_stream() for _ in requests]
    over = [False] * len(requests)
    size = placing.even(mesh, 1 << (len(requests) - 1).bit_length())  # few sizes are compiled
    prompts = [request.tokens for request in islice(cycle(requests), size)]
    drawing = decoding.Sampling(*sampling) if sampling else decoding.Sampling(temperature=0.0)
    limits = {"stops": lm.tokenizer.stops, "vocab_size": lm.tokenizer.vocab_size}
    for chunk in decoding.generate(lm.config, lm.params, prompts, most, drawing, seed, **limits, mesh=mesh):
        for row, (tokens, request) in enumerate(zip(chunk, requests, strict=False)):  # rows beyond are padding
            texts[row] += readers[row].push(tokens)
            over[row] |= len(tokens) < max(map(len, chunk)) or stopped(texts[row], request)
        if all(over):
            break
    texts = [text + reader.flush() for text, reader in zip(texts, readers, strict=True)]
    return [cut(text, request.until) for text, request in zip(texts, requests, strict=True)]


def stopped(text: str, request: Request) -> bool:
    return any(stop in text for stop in request.until if stop)


def cut(text: str, until: Sequence[str]) -> str:
    """`text` before the first of the stop strings in it."""
    for stop in filter(None, until):
        text = text.split(stop)[0]
    return text
