"""A split of pairs in rows, read by index. Pairs of files are tokenised, packed and cached; those of a task are made when
they are read."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from xfresearch.data import coverage
from xfresearch.data.cache import build_once, cache_root, complete, digest, write_meta
from xfresearch.data.corpora import open_split
from xfresearch.data.order import OnePart
from xfresearch.data.pairs import pair_packing
from xfresearch.data.pairs.pair_files import PairFiles
from xfresearch.data.pairs.pair_packing import Pair
from xfresearch.data.pairs.pair_tasks import PairTask
from xfresearch.data.row_file import ROWS, RowSplit, RowWriter
from xfresearch.data.tokenizers import Tokenizer, tokenizer_for
from xfresearch.options.run_options import DataConfig, RunConfig
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import inside
from xfresearch.runtime.progress import stage

FORMAT = 2
_CHUNK = 4096  # pairs that wait to be tokenised
_SAMPLE = 256  # rows of a task that are looked at before a run
_TRIES = 1000  # pairs of a task that are too long, one after another

Texts: TypeAlias = tuple[bytes, bytes]  # of a source and its target


def texts_of(corpus: str, split: str, data: DataConfig) -> PairFiles | PairTask:
    """The texts of a corpus of pairs, after a check that it has `split`. Raises UserError if it does not."""
    opened = open_split(corpus, split, data)
    assert isinstance(opened, PairFiles | PairTask)
    return opened


def encode(tokenizer: Tokenizer, pair: Texts) -> Pair:
    """The ids of a source and of a target. Both end with end_of_text, and begin with begin_of_text if the tokenizer has it
    and the decoder does not start from it."""
    source, target = (tokenizer.encode(text).tolist() for text in pair)
    begin, end = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text], [tokenizer.end_of_text]
    own = [] if begin == [tokenizer.decoder_start] else begin
    return Pair(np.array([*begin, *source, *end], np.int32), np.array([*own, *target, *end], np.int32))


def is_empty(pair: Texts) -> bool:
    """Whether the source or the target of a pair has no text: pairs of which one side is missing teach to write nothing."""
    return not all(text.strip() for text in pair)


def prepare(config: RunConfig, split: str, corpus: str, tokenizer: Tokenizer | None = None) -> "PairedSplit | TaskSplit":
    """The pairs of `split` of `corpus` in rows of config.source_length and config.sequence_length.

    Raises UserError if none of them fits. `.meta` has n_sequences, n_tokens, n_pairs, n_bytes, n_unknown and n_lost
    (coverage.py), and the pairs that are left out: n_longer, which do not fit, and n_empty (of files). Of a task they are
    estimates of what it would generate.
    """
    tokenizer = tokenizer or tokenizer_for(config.data)
    pairs = texts_of(corpus, split, config.data)
    if isinstance(pairs, PairTask):
        return TaskSplit(pairs, split, config, tokenizer)
    lengths = config.source_length, config.sequence_length
    of_ids = tokenizer.digest, tokenizer.decoder_start
    inputs = [FORMAT, pairs.identity(), split, of_ids, lengths, config.data.objective.rows]

    def build(directory: Path) -> None:
        workers = config.data.workers or os.cpu_count() or 1
        _write(directory, config, _encoded(pairs, split, corpus, tokenizer, workers), f"{corpus} {split}")

    target = cache_root(config.data) / "pairs" / f"{split}-{digest(inputs)}"
    return PairedSplit(build_once(target, build, complete), lengths, tokenizer.decoder_start)


class PairedSplit(RowSplit):
    """A split of pairs from files. It has the interface of packed.PackedSplit."""

    def __init__(self, directory: Path, lengths: tuple[int, int], start: int):
        super().__init__(directory)
        self.lengths, self.start = lengths, start

    def read(self, indices) -> dict[str, np.ndarray]:
        """Several rows at once, as pair_packing.unpack returns them."""
        rows = self.records(indices, 2 * sum(self.lengths))
        return pair_packing.unpack(rows, *self.lengths, self.start)


class TaskSplit(OnePart):
    """A split of a task. Row i has its pair i and, if rows are packed, more pairs while they fit. Longer pairs are left
    out."""

    byte_scale = 1.0

    def __init__(self, task: PairTask, split: str, config: RunConfig, tokenizer: Tokenizer):
        self.task, self.split, self.tokenizer = task, split, tokenizer
        self.lengths = config.source_length, config.sequence_length
        self.packs = config.data.objective.rows == "packed"
        self.digest = digest([FORMAT, task.identity(), split, tokenizer.digest, self.lengths, self.packs])
        self.meta = self._estimates()

    def __len__(self) -> int:
        return self.task.rows(self.split)

    def read(self, indices) -> dict[str, np.ndarray]:
        """Several rows at once, as pair_packing.unpack returns them."""
        rows = [self._row(int(i)) for i in indices]
        return pair_packing.batch(rows, *self.lengths, self.tokenizer.decoder_start)

    def _row(self, number: int) -> list[Pair]:
        row: list[Pair] = []
        pairs = map(partial(encode, self.tokenizer), self.task.endless(self.split, number))
        free = np.array(self.lengths)
        for pair in islice(pairs, _TRIES):
            if pair.fits(*free):
                row.append(pair)
                free -= [len(pair.source), len(pair.target)]
            if row and (not self.packs or not pair.fits(*free)):
                return row
        if not row:
            raise _none_fits(self.task, self.lengths)
        return row

    def _estimates(self) -> dict[str, Any]:
        """The counts of the first rows, for all rows."""
        count = min(_SAMPLE, len(self))
        rows = [self._row(number) for number in range(count)]
        firsts = [encode(self.tokenizer, next(self.task.endless(self.split, number))) for number in range(count)]
        longer = sum(not pair.fits(*self.lengths) for pair in firsts)
        tokens = sum(len(pair.source) + len(pair.target) for row in rows for pair in row)
        scale = len(self) / count
        counts = {"n_tokens": tokens, "n_pairs": sum(map(len, rows)), "n_longer": longer}
        return {name: round(value * scale) for name, value in counts.items()} | {"n_sequences": len(self), "n_bytes": 0}


def _encoded(pairs, split: str, corpus: str, tokenizer: Tokenizer, workers: int) -> Iterator[tuple[Pair, Texts, dict]]:
    """Each pair, its texts and their coverage. Encodes in threads: the libraries of tokenizers release the GIL."""

    def counted(texts: Texts) -> tuple[Pair, Texts, dict]:
        pair = encode(tokenizer, texts)
        source, target = (coverage.counts(tokenizer, *each) for each in zip(texts, pair, strict=True))
        return pair, texts, {name: source[name] + target[name] for name in source}

    texts = iter(pairs.pairs(split))
    with ThreadPoolExecutor(workers) as pool, stage(f"tokenising {corpus} {split}", pairs.n_bytes(split)) as progress:
        while chunk := list(islice(texts, _CHUNK)):
            yield from pool.map(counted, chunk)
            progress.update(sum(len(source) + len(target) for source, target in chunk))


def _write(directory: Path, config: RunConfig, encoded: Iterator[tuple[Pair, Texts, dict]], title: str) -> None:
    """Writes the rows of all pairs that fit, and the meta of the split."""
    lengths = config.source_length, config.sequence_length
    names = ("n_pairs", "n_longer", "n_empty", "n_bytes", "n_tokens", "n_unknown", "n_lost")
    count = dict.fromkeys(names, 0)

    def fitting() -> Iterator[Pair]:
        for pair, texts, lost in encoded:
            counted = "n_empty" if is_empty(texts) else "n_pairs" if pair.fits(*lengths) else "n_longer"
            count[counted] += 1
            if counted == "n_pairs":
                sizes = {"n_bytes": sum(map(len, texts)), "n_tokens": len(pair.source) + len(pair.target)}
                count.update({name: count[name] + number for name, number in (sizes | lost).items()})
                yield pair

    packs = config.data.objective.rows == "packed"
    rows = pair_packing.packed_rows(fitting(), *lengths) if packs else ([pair] for pair in fitting())
    writer = RowWriter(inside(directory, ROWS))
    for row in rows:
        writer.write(pair_packing.row(row, *lengths).tobytes())
    writer.close()
    if not writer.count:
        empty = f"{title}: " + ("the source or the target of every pair is empty" if count["n_empty"] else "it has no pairs")
        raise _none_fits(title, lengths) if count["n_longer"] else UserError(empty)
    write_meta(directory, count | {"n_sequences": writer.count, "digest": writer.digest, "lengths": lengths})


def _none_fits(what, lengths: tuple[int, int]) -> UserError:
    source_length, length = lengths
    return UserError(
        f"{what}: every pair is longer than config.source_length={source_length} or config.sequence_length={length} tokens"
    )
