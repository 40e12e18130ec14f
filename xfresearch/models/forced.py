"""Tokens of a generated text that a model's settings fix, as `transformers` does for BART: the first one, and the last one
of a text that reaches the greatest length. Their probability is 1."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

Forced: TypeAlias = tuple[int | None, int | None]  # the first token, and the last
NONE: Forced = (None, None)


def forced_in(forced: Forced, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[int], int | None]:
    """The forced first and last of `count` tokens. The first one is forced only after a decoder's start alone, and not in a
    text of one token that has a forced last one."""
    first, last = forced
    room = count > 1 or last is None
    return [first] if first is not None and room and all(len(prompt) == 1 for prompt in prompts) else [], last


def begun(
    forced: Forced, prompts: Sequence[Sequence[int]], count: int
) -> tuple[list[list[int]], int, list[int], int | None]:
    """The prompts with the first token, the number of tokens that are left to generate of `count`, and the forced tokens, as
    `with_forced` takes them."""
    first, last = forced_in(forced, prompts, count)
    left = max(0, count - len(first) - (last is not None))
    return [[*prompt, *first] for prompt in prompts], left, first, last


def with_forced(
    chunks: Iterator[list[list[int]]], first: list[int], last: int | None, stops: tuple[int, ...], rows: int, count: int
) -> Iterator[list[list[int]]]:
    """The chunks of `rows` texts of at most `count` tokens, between the forced tokens. A last token that stops a text is not
    yielded, as no other stop is."""
    if first:
        yield [first] * rows
    lengths = [0] * rows
    for chunk in chunks:
        lengths = [length + len(new) for length, new in zip(lengths, chunk, strict=True)]
        yield chunk
    if last is not None and last not in stops:
        yield [[last] if length == count else [] for length in lengths]
