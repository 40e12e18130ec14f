"""Log-likelihoods of continuations, batched by length.

A request has one or more windows. A window is a list of tokens whose last few are predicted, each from all tokens
before it. Windows with the same inputs share a row of a batch, whatever their targets are, so several choices of one
token cost no more than one. Rows are padded to a few sizes, so that few programs are compiled, and the longest rows
come first. Logits are computed only at predicted tokens, and for a few tokens at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.evaluation.losses import on_host
from xfresearch.kernels.cross_entropy import token_nll
from xfresearch.kernels.defaults import fast_layers
from xfresearch.models import transformer
from xfresearch.models.context import AUTO, SOURCE, Context, Execution, source_in
from xfresearch.models.model_config import ModelConfig
from xfresearch.sharding import placing

SHORTEST = 32  # input tokens of the smallest padded row
FEWEST = 4  # targets of the smallest padded row
LONGEST = 2048  # for the size of batches, longer models count as this long, because few items are longer


class Window(NamedTuple):
    """Tokens: all but the last are inputs, the last `scored` are predicted. source: what an encoder reads."""

    tokens: list[int]
    scored: int
    source: tuple[int, ...] = ()


class TokenRow(NamedTuple):
    """The inputs of a row, and the targets of each window that shares it: (index of the request, last tokens)."""

    inputs: tuple[int, ...]
    windows: list[tuple[int, list[int]]]
    source: tuple[int, ...] = ()

    @property
    def target_count(self) -> int:
        return sum(len(targets) for _, targets in self.windows)


def continuation_windows(context: list[int], continuation: list[int], length: int) -> list[Window]:
    """Windows with at most `length` inputs that predict `continuation` after `context`, which has at least one token.

    One window, which drops the first tokens of a long context, is enough unless the continuation is longer than
    `length`. Then the windows start from its end, and each predicts as many tokens as possible.
    """
    tokens = context + continuation
    windows = []
    unscored = len(continuation)
    while unscored > length:
        windows.append(Window(tokens[-length - 1 :], length))
        tokens = tokens[:-length]
        unscored -= length
    return [*windows, Window(tokens[-length - 1 :], unscored)]


@cache  # so that two models with the same config share their compiled programs
def make_scorer(model: ModelConfig, rows: int = 0, mesh=None, execution: Execution = AUTO) -> Callable:
    """Returns a jitted scorer(params, inputs, targets) -> (nll_BS, correct_BS), with S the targets of a row.

    A device holds the logits of `rows` tokens at a time (0: its default). Parameters and batches are sharded over `mesh`.
    """
    layers = fast_layers(model.depth, mesh).name

    @jax.jit
    def scorer(params, inputs, targets):
        lm = transformer.bind(model, params)
        source = source_in(inputs)
        ctx = Context(inputs["positions"], inputs["segments"], source=source, mesh=mesh, execution=execution)
        hidden_BLD = lm(inputs["tokens"], ctx, layers=layers).hidden_BLD
        hidden_BSD = jnp.take_along_axis(hidden_BLD, targets["index"][..., None], 1)
        return token_nll(hidden_BSD, lm.logit_head(), targets["tokens"], rows, mesh)

    return scorer


def score(
    scorer: Callable, params: dict, requests: Sequence[list[Window]], length: int, batch_size: int, mesh=None
) -> Iterator[list[tuple[int, tuple[float, bool]]]]:
    """Yields, batch by batch, (index, (log-likelihood, whether every target is the likeliest token)) of the finished
    requests.

    A batch has about as many tokens as `batch_size` sequences of `length` tokens, or of LONGEST if that is less.
    """
    remaining = [len(windows) for windows in requests]
    sums = [0.0] * len(requests)
    greedy = [True] * len(requests)

    def collect(rows: list[TokenRow], outputs) -> list:
        done = []
        for index, nll, correct in window_scores(rows, *on_host(dict(enumerate(outputs))).values()):
            sums[index] -= nll
            greedy[index] &= correct
            remaining[index] -= 1
            if not remaining[index]:
                done.append((index, (sums[index], greedy[index])))
        return done

    yield [(index, (0.0, True)) for index, windows in enumerate(requests) if not windows]
    pending = None  # the host fetches one batch's outputs while the device computes the next
    for rows, sizes in batches(requests, length, batch_size, mesh):
        count, tokens, targets = sizes
        arrays = make_batch(rows, count, tokens, targets, mesh)
        outputs = scorer(params, *arrays)
        if pending:
            yield collect(*pending)
        pending = rows, outputs
    if pending:
        yield collect(*pending)


def batches(
    requests: Sequence[list[Window]], length: int, batch_size: int, mesh=None
) -> Iterator[tuple[list[TokenRow], tuple]]:
    """Batches, the longest first: (rows, padded size). The size is the number of rows, of tokens and of targets."""
    shards = mesh.shape["context"] if mesh else 1  # lengths must be multiples of this
    by_size: dict = {}
    for row in make_rows(requests):
        tokens = min(_round_up(SHORTEST * shards, len(row.inputs), 2), length)
        by_size.setdefault((tokens, _round_up(FEWEST * shards, row.target_count, 4)), []).append(row)
    for tokens, targets in sorted(by_size, reverse=True):
        rows = by_size[tokens, targets]
        count = min(max(batch_size * min(length, LONGEST) // tokens, 1), _round_up(1, len(rows), 2))
        rows.sort(key=lambda row: -len(row.inputs))
        for first in range(0, len(rows), count):
            yield rows[first : first + count], (count, tokens, targets)


def make_rows(requests: Sequence[list[Window]]) -> list[TokenRow]:
    """One row for each distinct input."""
    rows: dict = {}
    for index, windows in enumerate(requests):
        for tokens, scored, source in windows:
            row = rows.setdefault((inputs := tuple(tokens[:-1]), source), TokenRow(inputs, [], source))
            row.windows.append((index, tokens[len(tokens) - scored :]))
    return list(rows.values())


def make_batch(rows: list[TokenRow], count: int, tokens: int, targets: int, mesh=None) -> tuple[dict, dict]:
    """Inputs [count, tokens] and targets [count, targets] of a batch, sharded over the mesh."""
    count, place_inputs = placing.batch_placer(mesh, count, tokens)
    _, place_targets = placing.batch_placer(mesh, count, targets)
    inputs = {name: np.zeros((count, tokens), np.int32) for name in ("tokens", "segments", "positions")}
    predicted = {name: np.zeros((count, targets), np.int32) for name in ("index", "tokens")}
    for number, row in enumerate(rows):
        here = (number, slice(len(row.inputs)))
        inputs["tokens"][here] = row.inputs
        inputs["segments"][here] = 1
        inputs["positions"][here] = np.arange(len(row.inputs))
        pairs = [(len(row.inputs) - len(last) + i, token) for _, last in row.windows for i, token in enumerate(last)]
        # strict=False: a row without targets has no pairs.
        for name, values in zip(("index", "tokens"), zip(*pairs, strict=True), strict=False):
            predicted[name][number, : len(pairs)] = values
    return place_inputs(inputs) | _sources(rows, count, mesh), place_targets(predicted)


def _sources(rows: list[TokenRow], count: int, mesh) -> dict:
    """The arrays of the sources [count, S] of a batch; {} without an encoder."""
    if not any(row.source for row in rows):
        return {}
    length = _round_up(SHORTEST, max(len(row.source) for row in rows), 2)
    tokens_BS, segments_BS = np.zeros((2, count, length), np.int32)
    for number, row in enumerate(rows):
        tokens_BS[number, : len(row.source)], segments_BS[number, : len(row.source)] = row.source, 1
    positions_BS = np.broadcast_to(np.arange(length, dtype=np.int32), (count, length))
    _, place = placing.batch_placer(mesh, count, length)
    return place(dict(zip(SOURCE, (tokens_BS, segments_BS, positions_BS), strict=True)))


def window_scores(rows: list[TokenRow], nll_BS, correct_BS) -> Iterator[tuple[int, float, bool]]:
    """(index of the request, nats, whether every target was the likeliest token) for each window of a batch."""
    for row, nll_S, correct_S in zip(rows, nll_BS, correct_BS, strict=False):  # the rows after are padding
        first = 0
        for index, targets in row.windows:
            here = slice(first, first + len(targets))
            first += len(targets)
            yield index, float(nll_S[here].sum(dtype=np.float64)), bool(correct_S[here].all())


def _round_up(size: int, needed: int, factor: int) -> int:
    """The smallest of size, size * factor, size * factor^2, ... that is at least `needed`."""
    while size < needed:
        size *= factor
    return size
