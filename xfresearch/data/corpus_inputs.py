"""The inputs of a corpus, and the shards that they are prepared in.

An input is a part of a corpus that can be opened by itself: a file, a part of one, or all documents of a split. A shard is
prepared from consecutive inputs, by one process. The shards are a pure function of the names and sizes of the inputs, so
that all processes and hosts have the same.

A new kind of source gives a list of inputs, and nothing else changes: see text_sources.TextFiles.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from xfresearch.data.cache import digest
from xfresearch.data.shard_file import TokenFile

LEAST, MOST, SHARDS = 16 << 20, 256 << 20, 64  # a shard has a 64th of the inputs, but at least and at most so many bytes
_FORMAT = 2
_SAMPLED = 16  # shards from which a tokenizer is trained
SAMPLES = 4  # shards that hold out documents, and by which all of a large corpus is estimated before it is prepared


@dataclass(frozen=True)
class Input:
    """`size` is about what is read, in bytes. `version()` is a JSON value that changes whenever the documents change, and is
    cheap to find; `digest()` is that of the content. `split` has all documents, or is '' if each has its own."""

    name: str
    size: int
    read: Callable[[], Iterator[bytes]]
    version: Callable[[], Any]
    digest: Callable[[], str]
    split: str = ""

    @cached_property
    def found(self) -> list:
        """Its name, size and version when they were first asked for."""
        return [self.name, self.size, self.version()]


@dataclass(frozen=True)
class Shard:
    """Consecutive inputs of one split, or of documents that each have their own. `samples`: it holds out documents."""

    number: int
    inputs: tuple[Input, ...]
    samples: bool

    @cached_property
    def size(self) -> int:
        return sum(each.size for each in self.inputs)

    @property
    def split(self) -> str:
        return self.inputs[0].split

    def has(self, split: str) -> bool:
        """Whether documents of `split` may be in it. Those that are held out are only in shards that sample."""
        return self.split == split if self.split else self.samples or split == "train"

    def documents(self) -> Iterator[bytes]:
        return (text for each in self.inputs for text in each.read() if text)


def shards_of(inputs: Sequence[Input], divided: Callable | None = None) -> list[Shard]:
    """The shards of a corpus, in order. Of each split, SAMPLES evenly spaced ones sample. By default they are of about the
    same size; divided(inputs of a split) may give the inputs of each instead."""
    shards: list[Shard] = []
    for _, group in groupby(inputs, key=lambda each: each.split):
        parts = (divided or _divided)(list(group))
        sampled = {len(parts) * number // SAMPLES for number in range(SAMPLES)}
        shards += [Shard(len(shards) + i, tuple(part), i in sampled) for i, part in enumerate(parts)]
    return shards


def _divided(inputs: list[Input]) -> list[list[Input]]:
    """Consecutive inputs in parts of about the same size."""
    wanted = int(np.clip(sum(each.size for each in inputs) // SHARDS, LEAST, MOST))
    parts: list[list[Input]] = [[]]
    for each in inputs:
        if parts[-1] and sum(one.size for one in parts[-1]) + each.size // 2 > wanted:
            parts.append([])
        parts[-1].append(each)
    return parts if inputs else []


def of_splits(source, name: str) -> list[Input]:
    """The inputs of a source that knows its splits: one for each."""

    def content() -> str:
        return hashlib.sha256(json.dumps(source.identity(), sort_keys=True).encode()).hexdigest()

    return [
        Input(f"{name} {split}", source.n_bytes(split), partial(source.documents, split), source.identity, content, split)
        for split in source.splits
    ]


class TextCorpus:
    """A corpus of text: its `splits`, and the documents of its shards with their splits."""

    name: str
    splits: tuple[str, ...]
    in_place = False  # whether its tokens are read where they lie

    @cached_property
    def inputs(self) -> list[Input]:
        raise NotImplementedError

    def identity(self) -> dict:
        """A JSON value that changes whenever the documents change."""
        return {"corpus": self.name, "format": _FORMAT, "inputs": digest([each.found for each in self.inputs])}

    def divide(self, shard: Shard) -> Iterator[tuple[str, bytes]]:
        """The split and the text of each document of a shard, in order."""
        raise NotImplementedError

    @cached_property
    def shards(self) -> list[Shard]:
        return shards_of(self.inputs)

    def shards_with(self, split: str) -> list[Shard]:
        """The shards in which documents of a split may be."""
        return [shard for shard in self.shards if shard.has(split)]

    def documents(self, split: str) -> Iterator[bytes]:
        """The documents of a split, in order."""
        pairs = (pair for shard in self.shards_with(split) for pair in self.divide(shard))
        return (text for of, text in pairs if of == split)

    def n_bytes(self, split: str) -> int:
        """About how many bytes a split has."""
        return sum(shard.size for shard in self.shards_with(split))

    def sample(self, split: str) -> tuple[Iterator[bytes], int]:
        """The documents of evenly spaced shards of a split, and about how many bytes these are: all of a small corpus."""
        shards = self.shards_with(split)
        chosen = shards[:: -(-len(shards) // _SAMPLED)]
        pairs = (pair for shard in chosen for pair in self.divide(shard))
        return (text for of, text in pairs if of == split), sum(shard.size for shard in chosen)

    def opened(self, shard: Shard, path: Path, meta: dict[str, Any]) -> TokenFile:
        """The tokens of a split in a shard that is prepared at `path`."""
        return TokenFile(path, meta)
