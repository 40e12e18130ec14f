"""Log-likelihoods of continuations, batched by length.

A request is one window or more: tokens, of which the last few are predicted, each from all before it. Windows that read the
same tokens share a row of a batch, whatever each asks of it: choices of one token cost no more than one of them. Rows are
padded to few sizes, so that few programs are compiled, and the longest come first. Logits are computed where they are
asked for, and of few tokens at once.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.evaluation import on_host
from xfresearch.kernels.cross_entropy import token_nll
from xfresearch.models import transformer
from xfresearch.models.context import Context, Execution
from xfresearch.models.decoding import fast_layers
from xfresearch.models.model_config import ModelConfig
from xfresearch.sharding import placing

SHORTEST = 32  # tokens that the smallest row reads
FEWEST = 4  # and predicts
LONGEST = 2048  # tokens that a sequence of a batch is counted as where the model reads more, as few items do


class Window(NamedTuple):
    """Tokens, of which all but the last are read and the last `scored` predicted."""

    tokens: list[int]
    scored: int


class Row(NamedTuple):
    """The tokens that a row reads, and who asks for which last ones: (number of the request, targets)."""

    inputs: tuple[int, ...]
    asked: list[tuple[int, list[int]]]

    @property
    def targets(self) -> int:
        return sum(len(targets) for _, targets in self.asked)


def continuation_windows(context: list[int], continuation: list[int], length: int) -> list[Window]:
    """The windows of at most `length` tokens read that predict `continuation` after `context`, of at least one token.

    One window, cut on the left, does unless the continuation itself is longer: then as many as it needs, from its end, each
    predicting as much as it can.
    """
    tokens, found = context + continuation, []
    left = len(continuation)
    while left > length:
        found.append(Window(tokens[-length - 1 :], length))
        tokens, left = tokens[:-length], left - length
    return [*found, Window(tokens[-length - 1 :], left)]


@cache  # so that two models of one form share their programs
def make_scorer(
    model: ModelConfig, rows: int = 1024, mesh=None, execution: Execution = Execution()
) -> Callable:
    """scorer(params, reading, asking) -> (nll_BS, correct_BS) of the targets `asking` names after what `reading` holds.

    `rows` is how many tokens' logits a device has at once, `mesh` what the parameters and batches lie on.
    """
    layers = fast_layers(mesh)

    @jax.jit
    def scorer(params, reading, asking):
        lm = transformer.bind(model, params)
        ctx = Context(reading["positions"], reading["segments"], mesh=mesh, execution=execution)
        hidden_BLD = lm(reading["tokens"], ctx, layers=layers).hidden_BLD
        hidden_BSD = jnp.take_along_axis(hidden_BLD, asking["places"][..., None], 1)
        return token_nll(hidden_BSD, lm.logit_head(), asking["targets"], rows, mesh)

    return scorer


def score(
    scorer: Callable, params: dict, requests: Sequence[list[Window]], length: int, batch_size: int, mesh=None
) -> Iterator[list[tuple[int, tuple[float, bool]]]]:
    """Yields, batch by batch, (number, (log-likelihood, whether each token is the likeliest)) of the requests that are done.

    A batch reads about as many tokens as `batch_size` sequences of `length` have, or of LONGEST if that is less.
    """
    waiting_for = [len(windows) for windows in requests]
    sums, greedy = [0.0] * len(requests), [True] * len(requests)

    def collect(rows: list[Row], outputs) -> list:
        done = []
        for number, nll, correct in answers(rows, *on_host(dict(enumerate(outputs))).values()):
            sums[number] -= nll
            greedy[number] &= correct
            waiting_for[number] -= 1
            if not waiting_for[number]:
                done.append((number, (sums[number], greedy[number])))
        return done

    yield [(number, (0.0, True)) for number, windows in enumerate(requests) if not windows]
    waiting = None
    for rows, sizes in batches(requests, length, batch_size, mesh):
        arrays = placed(rows, *sizes, mesh)
        outputs = scorer(params, *arrays)
        if waiting:  # read while the device has the next one
            yield collect(*waiting)
        waiting = rows, outputs
    if waiting:
        yield collect(*waiting)


def batches(
    requests: Sequence[list[Window]], length: int, batch_size: int, mesh=None
) -> Iterator[tuple[list[Row], tuple]]:
    """(rows, (rows, tokens and targets of the batch that they are padded to)), the longest first."""
    cut = mesh.shape["context"] if mesh else 1
    by_size = {}
    for row in rows_of(requests):
        tokens = min(_grown(SHORTEST * cut, len(row.inputs), 2), length)
        by_size.setdefault((tokens, _grown(FEWEST * cut, row.targets, 4)), []).append(row)
    for tokens, targets in sorted(by_size, reverse=True):
        rows = by_size[tokens, targets]
        count = min(max(batch_size * min(length, LONGEST) // tokens, 1), _grown(1, len(rows), 2))
        rows.sort(key=lambda row: -len(row.inputs))
        for first in range(0, len(rows), count):
            yield rows[first : first + count], (count, tokens, targets)


def rows_of(requests: Sequence[list[Window]]) -> list[Row]:
    """A row for each different sequence of tokens that is read."""
    rows = {}
    for number, windows in enumerate(requests):
        for tokens, scored in windows:
            row = rows.setdefault(inputs := tuple(tokens[:-1]), Row(inputs, []))
            row.asked.append((number, tokens[len(tokens) - scored :]))
    return list(rows.values())


def placed(rows: list[Row], count: int, tokens: int, targets: int, mesh=None) -> tuple[dict, dict]:
    """What a batch of `count` rows reads [count, tokens] and is asked [count, targets], laid over the mesh."""
    (count, place_tokens), (_, place_targets) = (placing.on(mesh, count, length) for length in (tokens, targets))
    reading = {name: np.zeros((count, tokens), np.int32) for name in ("tokens", "segments", "positions")}
    asking = {name: np.zeros((count, targets), np.int32) for name in ("places", "targets")}
    for number, row in enumerate(rows):
        here = (number, slice(len(row.inputs)))
        reading["tokens"][here], reading["segments"][here] = row.inputs, 1
        reading["positions"][here] = np.arange(len(row.inputs))
        wanted = [(len(row.inputs) - len(last) + i, token) for _, last in row.asked for i, token in enumerate(last)]
        for name, values in zip(("places", "targets"), zip(*wanted, strict=True), strict=False):
            asking[name][number, : len(wanted)] = values
    return place_tokens(reading), place_targets(asking)


def answers(rows: list[Row], nll_BS, correct_BS) -> Iterator[tuple[int, float, bool]]:
    """(number of the request, nats, whether every token was the likeliest) for each window of a batch."""
    for row, nll_S, correct_S in zip(rows, nll_BS, correct_BS, strict=False):  # rows beyond are padding
        first = 0
        for number, targets in row.asked:
            here, first = slice(first, first + len(targets)), first + len(targets)
            yield number, float(nll_S[here].sum(dtype=np.float64)), bool(correct_S[here].all())


def _grown(size: int, needed: int, factor: int) -> int:
    """The least of size, size * factor, size * factor^2, ... that is at least `needed`."""
    while size < needed:
        size *= factor
    return size
