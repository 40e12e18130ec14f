"""Batches: a pure function of (seed, step), of which a process reads the rows that it needs, ahead in a thread.

Nothing here has a state worth saving: to resume is to ask for the next step, on any number of hosts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from xfresearch.config.run import Config
from xfresearch.data import packed
from xfresearch.data.labelled import LabelledSplit
from xfresearch.data.labels import has_labels
from xfresearch.data.packed import PackedSplit, stream_tokens

__all__ = ["Batches", "LabelledSplit", "PackedSplit", "Prefetch", "evaluation_batches", "prepare", "stream_tokens"]


def prepare(config: Config, split: str, corpus: str | None = None) -> PackedSplit | LabelledSplit:
    """The sequences of `split` of `corpus` (the first of config.data.corpus where none is given), read by index.

    A text is tokenised, packed and cached first. UserError if it is too short, or the corpus has no such split.
    """
    corpus = corpus or config.data.corpus[0]
    if has_labels(corpus):
        return LabelledSplit(corpus, split, config.sequence_length)
    return packed.prepare(config, split, corpus)


class Batches:
    """The training batches of a config: each corpus shuffled anew every epoch, mixed by config.data.weights."""

    def __init__(self, config: Config, seed: int | None = None):
        self.config = config
        self.corpora = [prepare(config, "train", corpus) for corpus in config.data.corpus]
        self._order = _order(self.corpora, config.data.weights, config.seed if seed is None else seed)

    def batch(self, step: int, rows: Sequence[int] | None = None) -> dict[str, np.ndarray]:
        """Arrays [batch_size, L] of `step`, or only these `rows` of them: no other is read."""
        size = self.config.batch_size
        picks = np.array([self._order[step * size + int(row)] for row in (range(size) if rows is None else rows)])
        parts = []
        for number, corpus in enumerate(self.corpora):
            chosen = np.flatnonzero(picks[:, 0] == number)
            if len(chosen):
                parts.append((chosen, corpus.read(picks[chosen, 1])))
        back = np.argsort(np.concatenate([chosen for chosen, _ in parts]))
        return {name: np.concatenate([part[name] for _, part in parts])[back] for name in parts[0][1]}

    def iterate(
        self, start: int, stop: int, rows: Sequence[int] | None = None, place: Callable = lambda batch: batch
    ) -> "Prefetch":
        """(step, place(batch)) for steps in [start, stop), config.data.prefetch of them made ahead in a thread."""
        return Prefetch(lambda step: place(self.batch(step, rows)), range(start, stop), self.config.data.prefetch)


class Prefetch:
    """Iterator over (step, make(step)) that keeps `ahead` results in preparation; `wait_seconds` is time lost waiting.

    One thread makes them in order, so `make` may place arrays on devices. Its errors are raised at the step they hit.
    Use it in a `with`, or call `close()`, to stop early.
    """

    def __init__(self, make: Callable, steps, ahead: int):
        self.wait_seconds = 0.0
        self._make, self._steps, self._waiting = make, iter(steps), deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        for _ in range(ahead):
            self._submit()

    def _submit(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._waiting.append((step, self._pool.submit(self._make, step)))

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self):
        if not self._waiting:
            self.close()
            raise StopIteration
        step, future = self._waiting.popleft()
        began = time.perf_counter()
        try:
            made = future.result()
        except BaseException:
            self.close()
            raise
        self.wait_seconds += time.perf_counter() - began
        self._submit()
        return step, made

    def close(self) -> None:
        self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def evaluation_batches(
    held_out: PackedSplit | LabelledSplit, batch_size: int, limit: int = 0, rows: Sequence[int] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Batches [batch_size, L] in order, or only these `rows` of each; the last is filled up with rows of weight 0, so that
    shapes never change.

    With a `limit`, that many sequences spread evenly over the split.
    """
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    total = len(held_out)
    used = min(limit or total, total)
    indices = np.arange(used) * total // used
    for first in range(0, used, batch_size):
        real = first + rows < used
        own = indices[(first + rows)[real]]
        batch = held_out.read(own if len(own) else indices[:1])
        yield {name: _spread(values[: len(own)], real) for name, values in batch.items()}


def _spread(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """`values` as the rows that are `real`, zeros as the others."""
    if real.all():
        return values
    spread = np.zeros((len(real), *values.shape[1:]), values.dtype)
    spread[real] = values
    return spread


def _order(corpora: list[PackedSplit | LabelledSplit], weights: tuple[float, ...], seed: int):
    """grain MapDataset without end of (corpus, sequence) pairs."""
    import grain

    seeds = np.random.SeedSequence(seed).generate_state(len(corpora))
    orders = [
        grain.MapDataset.range(len(sequences)).shuffle(seed=int(own)).map(lambda i, number=number: (number, i)).repeat()
        for number, (sequences, own) in enumerate(zip(corpora, seeds, strict=True))
    ]
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights or None)
