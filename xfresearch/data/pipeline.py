"""Batches as a pure function of (seed, step). A process reads only the rows that it needs, and prefetches in a thread.

There is no iterator state to save: a resumed run asks for the next step, on any number of hosts.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from xfresearch.data import packed
from xfresearch.data.labelled import LabelledSplit
from xfresearch.data.labels import has_labels
from xfresearch.data.objectives import Corrupted, generators, objective_of, row_length
from xfresearch.data.order import Order
from xfresearch.data.packed import PackedSplit, stream_tokens
from xfresearch.data.tokenizers import Tokenizer, tokenizer_for
from xfresearch.options.run_options import RunConfig
from xfresearch.runtime.errors import UserError

if TYPE_CHECKING:
    from xfresearch.data.chat.chat_splits import ChatSplit
    from xfresearch.data.pairs.pair_splits import PairedSplit, TaskSplit

__all__ = ["Batches", "LabelledSplit", "PackedSplit", "Prefetch", "evaluation_batches", "prepare", "stream_tokens"]

_ENDLESS = 1 << 50  # rows

Split: TypeAlias = "PackedSplit | LabelledSplit | Corrupted | PairedSplit | TaskSplit | ChatSplit"


def prepare(
    config: RunConfig, split: str, corpus: str | None = None, tokenizer: Tokenizer | None = None, seed: int | None = None
) -> Split:
    """The sequences of `split` of `corpus` (default: the first of config.data.corpus), read by index.

    Text is tokenised first (by default with the tokenizer of config.data); with the `seed` of an order, not all of it is:
    see PackedSplit.
    Raises UserError if it is too short or if the corpus has no such split.
    """
    corpus = corpus or config.data.corpus[0]
    if has_labels(corpus):
        return LabelledSplit(corpus, split, config.sequence_length)
    if config.data.objective.kind == "seq2seq":
        from xfresearch.data.pairs import pair_splits

        return pair_splits.prepare(config, split, corpus, tokenizer)
    if config.data.objective.kind == "chat":
        from xfresearch.data.chat import chat_splits

        return chat_splits.prepare(config, split, corpus, tokenizer)
    tokenizer = tokenizer or tokenizer_for(config.data)
    objective = objective_of(config, tokenizer)
    rows = packed.prepare(replace(config, sequence_length=row_length(config)), split, corpus, tokenizer, seed)
    return Corrupted(rows, objective) if objective else rows


class Batches:
    """The training batches of a config. Each corpus is reshuffled every epoch; config.data.weights mixes corpora."""

    def __init__(self, config: RunConfig, seed: int | None = None, tokenizer: Tokenizer | None = None):
        self.config = config
        self._seed = config.seed if seed is None else seed
        self._seeds = np.random.SeedSequence(self._seed).generate_state(len(config.data.corpus)).tolist()
        named = zip(config.data.corpus, self._seeds, strict=True)
        self.corpora = [prepare(config, "train", corpus, tokenizer, seed) for corpus, seed in named]
        self._mixture = _mixture(len(self.corpora), config.data.weights)

    @cached_property
    def _orders(self) -> list[Order]:
        """Of each corpus. The first one that is asked for a row waits for the shards of its first window."""
        return [Order(corpus, seed) for corpus, seed in zip(self.corpora, self._seeds, strict=True)]

    def batch(self, step: int, rows: Sequence[int] | np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Arrays [batch_size, L] of `step`, or only the given `rows` of them; no other row is read."""
        size = self.config.batch_size
        rows = range(size) if rows is None else rows
        places = np.array([step * size + int(row) for row in rows])  # among all rows of the run
        picks = np.array([self._pick(place) for place in places.tolist()])
        parts, chosen = [], []
        for number, shard in np.unique(picks[:, :2], axis=0).tolist():
            chosen.append(np.flatnonzero((picks[:, 0] == number) & (picks[:, 1] == shard)))
            parts.append(self._read(self.corpora[number], shard, picks[chosen[-1], 2], places[chosen[-1]]))
        return packed.restored(parts, chosen)

    def _pick(self, place: int) -> tuple[int, int, int]:
        """The corpus, the shard and the row of a place among all rows of the run."""
        number, index = self._mixture[place]
        return number, *self._orders[number][index]

    def read_before(self, step: int) -> dict[str, str]:
        """Digests of the shards that decide the batches before a step, of the corpora whose own digest does not have them:
        a run that resumes must find them again."""
        found = {}
        for number, (name, corpus) in enumerate(zip(self.config.data.corpus, self.corpora, strict=True)):
            split = corpus.split if isinstance(corpus, Corrupted) else corpus
            if isinstance(split, PackedSplit) and not split.known:
                places = (self._mixture[place] for place in range(step * self.config.batch_size - 1, -1, -1))
                last = next((index for of, index in places if of == number), -1)
                order = Order(split, self._seeds[number])  # another thread reads by the run's own
                found[f"train split of {name}, as read"] = split.content(order.read_before(last + 1))
        return found

    def _read(self, corpus: Split, shard: int, indices, places) -> dict[str, np.ndarray]:
        if isinstance(corpus, Corrupted):  # every epoch draws anew what a model sees of a row
            return corpus.objective(corpus.split.part(shard).read(indices), generators(self._seed, places))
        return corpus.part(shard).read(indices)

    def bytes_per_token(self) -> float | None:
        """Bytes of text that come back per token of these batches, on average; None if there are none, or if the loss is not
        that of every token of a text."""
        if self.config.data.objective.kind != "next":
            return None
        metas = [corpus.meta | {"n_kept": corpus.meta["n_bytes"] - corpus.meta.get("n_lost", 0)} for corpus in self.corpora]
        shares = self.config.data.weights or [1] * len(metas)  # of the sequences
        counts = [
            sum(share * meta[name] / meta["n_sequences"] for share, meta in zip(shares, metas, strict=True))
            for name in ("n_kept", "n_tokens")
        ]
        return counts[0] / counts[1] or None

    def iterate(self, start: int, stop: int, rows: Sequence[int] | np.ndarray | None = None) -> "Prefetch":
        """(step, batch) for steps in [start, stop). A thread prefetches config.data.prefetch of them."""
        return Prefetch(lambda step: self.batch(step, rows), range(start, stop), self.config.data.prefetch)


class Prefetch:
    """Iterator over (step, make(step)) that prefetches `ahead` results.

    Another thread makes them in order. It must not touch a device (sharding/first_execution.py). An error in `make` is
    raised at its step. To stop early, use it in a `with` block or call `close()`.
    """

    def __init__(self, make: Callable, steps, ahead: int):
        self._make = make
        self._steps = iter(steps)
        self._waiting: deque[tuple[int, Future]] = deque()
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
        try:
            made = future.result()
        except BaseException:
            self.close()
            raise
        self._submit()
        return step, made

    def ready(self) -> bool:
        """Whether the next result is there: `next` neither waits nor raises."""
        future = self._waiting[0][1] if self._waiting else None
        return future is not None and future.done() and future.exception() is None

    def close(self) -> None:
        self._waiting.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def evaluation_batches(
    held_out: Split, batch_size: int, limit: int = 0, rows: Sequence[int] | np.ndarray | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Batches [batch_size, L] in order, or only the given `rows` of each.

    The last batch is padded with rows of weight 0, so that all batches have one shape. With `limit`, that many
    sequences are used, spread evenly over the split. Raises UserError without a limit for a split that does not end.
    """
    if isinstance(held_out, LabelledSplit) and held_out.endless and not limit:
        raise UserError(f"split {held_out.split!r} does not end: give a number of sequences (evaluation.sequences, --limit)")
    read = held_out.graded if isinstance(held_out, LabelledSplit) else held_out.read
    own = np.arange(batch_size) if rows is None else np.asarray(rows)
    indices = spread(len(held_out), limit)
    used = len(indices)
    for first in range(0, used, batch_size):
        real = first + own < used
        chosen = indices[(first + own)[real]]
        # If all rows are padding, one sequence is still read, for the names and dtypes of the arrays.
        batch = read(chosen if len(chosen) else indices[:1])
        yield {name: _pad_rows(values[: len(chosen)], real) for name, values in batch.items()}


def spread(total: int, limit: int = 0) -> np.ndarray:
    """The numbers of at most `limit` of `total` sequences (0: all), spread evenly."""
    used = min(limit or total, total)
    return np.arange(used) * total // used


def _pad_rows(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """`values` in the rows where `real` is true, zeros in the others."""
    if real.all():
        return values
    padded = np.zeros((len(real), *values.shape[1:]), values.dtype)
    padded[real] = values
    return padded


def _mixture(corpora: int, weights: tuple[float, ...]) -> Any:
    """A sequence without end: the corpus of each row of a run, and the row's place among those of the corpus."""
    import grain

    places = [grain.MapDataset.range(_ENDLESS).map(lambda i, number=number: (number, i)) for number in range(corpora)]
    return places[0] if corpora == 1 else grain.MapDataset.mix(places, weights or None)
