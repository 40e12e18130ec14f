"""A split of a corpus of text in rows, which are packed when they are read from its shards (prepared.py)."""

import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import Any

import numpy as np

from xfresearch.data import packing
from xfresearch.data.cache import digest
from xfresearch.data.corpora import open_split
from xfresearch.data.order import drawn
from xfresearch.data.prepared import Prepared
from xfresearch.data.shard_file import TokenFile
from xfresearch.data.tokenizers import Tokenizer, tokenizer_for
from xfresearch.options.run_options import RunConfig
from xfresearch.runtime.errors import UserError

_OPEN = 64  # shards
_HASHED = 1 << 20  # tokens at a time
_COUNTS = ("n_bytes", "n_characters", "n_token_bytes", "n_unknown", "n_lost", "n_tokens", "n_documents")


class Part:
    """The rows of one shard of a split. `file` is None if the shard has no document of it."""

    def __init__(self, file: TokenFile | None, length: int, whole_documents: bool, keep_last: bool):
        self.file, self.length = file, length
        self.pad = int(np.iinfo(file.dtype).max) if file else 0
        if not file:
            self.rows = packing.stream_rows(0, length, False)
        elif whole_documents:
            self.rows = file.stored_rows
        else:
            self.rows = packing.stream_rows(file.meta["n_tokens"], length, keep_last)

    def __len__(self) -> int:
        return len(self.rows.firsts) - 1

    def read(self, indices) -> dict[str, np.ndarray]:
        """Several rows at once: arrays [n, L]."""
        return packing.unpack(self._laid_out(np.asarray(indices, np.int64)), self.pad)

    def _laid_out(self, chosen: np.ndarray) -> np.ndarray:
        assert self.file
        return packing.lay_out(self.rows, chosen, self.file.read, self.length, self.pad)

    def digest(self, whole_documents: bool) -> str:
        """Of the rows, as versions that stored them took it, so that their runs and studies are compared with this one."""
        assert self.file
        content = hashlib.sha256()
        dtype = self.file.dtype if self.length < self.pad or not whole_documents else np.dtype(np.uint32)
        step = max(1, _HASHED // self.length)
        for first in range(0, len(self), step):
            rows = self._laid_out(np.arange(first, min(first + step, len(self))))
            content.update((rows if whole_documents else rows[:, 0]).astype(dtype).tobytes())
        return content.hexdigest()


class PackedSplit:
    """A split in sequences of L tokens, read by index.

    With the `seed` of an order (order.py), not all of it need be there: the shards are made in that order while the caller
    goes on. Only those that sample are waited for, and `meta` has estimates by them; others are waited for when their rows
    are asked for.
    """

    def __init__(self, prepared: Prepared, split: str, length: int, seed: int | None = None):
        self.prepared, self.split, self.length = prepared, split, length
        self.shards = [shard.number for shard in prepared.corpus.shards_with(split)]
        self.parts = len(self.shards)
        self._opened = lru_cache(_OPEN)(self._open)
        self._samples = [number for number in self.shards if prepared.shards[number].samples]
        if seed is not None and len(self._samples) < self.parts:
            prepared.begin(self._samples + [self.shards[part] for part in drawn(self.parts, seed, epoch=0)])
        self.meta = self._counts(self.shards if seed is None else self._samples)
        self.digest = self.meta["digest"] = self._digest()

    @property
    def directory(self):
        return self.prepared.folder

    def __len__(self) -> int:
        """Of a split that is not there as a whole, an estimate."""
        return self.meta["n_sequences"]

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """tokens, targets, segments, positions int32[L] and weights float32[L], 0 for a position without a target."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)}")
        return {name: values[0] for name, values in self.read([i % len(self)]).items()}

    @property
    def byte_scale(self) -> float:
        """Bytes of the text that come back for each byte of its tokens by the tokenizer's table: 1 for a tokenizer that
        returns any bytes unchanged. Others may count a space in front, which the text does not have."""
        return (self.meta["n_bytes"] - self.meta["n_lost"]) / max(self.meta["n_token_bytes"], 1)

    def read(self, indices) -> dict[str, np.ndarray]:
        """Several sequences at once: arrays [n, L]."""
        indices = np.asarray(indices, np.int64)
        if self.parts == 1:
            return self._opened(0).read(indices)
        at = np.searchsorted(self._ends, indices, side="right")
        first = np.concatenate([[0], self._ends])[at]  # of the shard of each
        chosen = [np.flatnonzero(at == number) for number in np.unique(at)]
        return restored([self.part(int(at[own[0]])).read((indices - first)[own]) for own in chosen], chosen)

    def part(self, number: int) -> "PackedSplit | Part":
        """The rows of one shard, which is waited for."""
        return self if self.parts == 1 else self._opened(number)

    def rows_of(self, parts: Sequence[int]) -> list[int]:
        """The number of rows of shards, which are waited for."""
        self.prepared.require([self.shards[part] for part in parts])
        return [len(self._opened(part)) for part in parts]

    def content(self, parts: Sequence[int]) -> str:
        """A digest of the tokens of shards, which are waited for."""
        return digest(self._digests([self.shards[part] for part in parts]))

    @property
    def known(self) -> bool:
        """Whether `digest` is that of all content, which is there before a run begins."""
        return len(self._samples) == self.parts

    def _open(self, part: int) -> Part:
        self.prepared.require([self.shards[part]])
        file = self.prepared.tokens(self.shards[part], self.split)
        return Part(file, self.length, bool(self.prepared.length), keep_last=self.split != "train")

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.rows_of(range(self.parts)))

    def _counts(self, known: list[int]) -> dict[str, Any]:
        """The meta of the split (prepare). Raises UserError if it is too short."""
        self.prepared.require(known)
        parts = [self._opened(self.shards.index(number)) for number in known]
        files = [part.file.meta for part in parts if part.file]
        counts = {name: sum(meta[name] for meta in files) for name in _COUNTS}
        counts["n_sequences"] = sum(map(len, parts))
        laid = sum(int(part.rows.lengths.sum()) for part in parts)
        counts["n_predictions"] = laid - sum(len(part.rows.lengths) for part in parts)
        fill = laid / max(counts["n_sequences"] * (self.length + 1), 1)
        needed = self.length + 1 if self.split == "train" else 2  # other splits may be shorter: they are padded
        if not counts["n_sequences"] or counts["n_tokens"] < needed:
            where = f"corpus {self.prepared.corpus_name!r}, split {self.split!r}: it has {counts['n_tokens']} tokens"
            raise UserError(f"{where}; one sequence needs at least {needed} with config.sequence_length={self.length}")
        if len(known) < self.parts:
            shards = self.prepared.shards
            whole, seen = (sum(shards[n].size for n in numbers) for numbers in (self.shards, known))
            counts = {name: round(number * whole / max(seen, 1)) for name, number in counts.items()} | {"estimated": True}
        return counts | {"fill": fill}

    def _digest(self) -> str:
        """Of the content, or if not all of it is there before a run begins, of the sizes of the inputs."""
        if self.parts == 1 and not self.prepared.corpus.in_place:
            return self._opened(0).digest(bool(self.prepared.length))
        if self.known:
            return digest([self.length, self._digests(self.shards)])
        inputs = (each for number in self.shards for each in self.prepared.shards[number].inputs)
        names = [[PurePath(each.name).name, each.size] for each in inputs]
        return digest([self.length, names, self.prepared.tokenizer.digest, self.prepared.length])

    def _digests(self, numbers: list[int]) -> list[str]:
        self.prepared.require(numbers)
        found = [self.prepared.tokens(number, self.split) for number in numbers]
        return [file.meta["digest"] if file else "" for file in found]


def restored(parts: list[dict[str, np.ndarray]], places: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The rows of several batches in one, each at its place."""
    order = np.argsort(np.concatenate(places))
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def prepare(
    config: RunConfig, split: str, corpus: str, tokenizer: Tokenizer | None = None, seed: int | None = None
) -> PackedSplit:
    """`split` of `corpus`, tokenised (by default with the tokenizer of `config.data`) where it is not yet.

    Raises UserError if the corpus is too short.

    `.meta` holds n_sequences, n_tokens (with separators), n_predictions, n_documents, n_bytes and n_characters (of the text
    only), n_token_bytes (of its tokens, by the tokenizer's table), n_unknown and n_lost (coverage.py), fill, the share of
    tokens that are not padding, and a digest of the sequences. With a `seed`, most are estimates of a
    large corpus: see PackedSplit.
    """
    open_split(corpus, split, config.data)
    tokenizer = tokenizer or tokenizer_for(config.data)
    prepared = Prepared(config.data, corpus, tokenizer, config.sequence_length)
    return PackedSplit(prepared, split, config.sequence_length, seed)


def stream_tokens(
    config: RunConfig, split: str, corpus: str | None = None, tokenizer: Tokenizer | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of a split in order, int32[n], and the document number of each, int32[n].

    A separator belongs to the document before it. The default `corpus` and `tokenizer` are those of the config.
    """
    corpus = corpus or config.data.corpus[0]
    open_split(corpus, split, config.data)
    tokenizer = tokenizer or tokenizer_for(config.data)
    prepared = Prepared(config.data, corpus, tokenizer, config.sequence_length)
    numbers = [shard.number for shard in prepared.corpus.shards_with(split)]
    prepared.require(numbers)
    files = [file for number in numbers if (file := prepared.tokens(number, split))]
    sizes = np.concatenate([np.zeros(0, np.uint32), *(file.sizes for file in files)])
    tokens = np.concatenate([np.zeros(0, np.int32), *(file.tokens().astype(np.int32) for file in files)])
    return tokens, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
