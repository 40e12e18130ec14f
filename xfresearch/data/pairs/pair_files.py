"""Pairs from files of rows with two fields: those that rows.py reads."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from xfresearch.data.corpus_files import READER, find_files, names_files
from xfresearch.data.rows import READABLE, READERS, text_of
from xfresearch.data.text_sources import SPLITS, split_of
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.runtime.formats import WHAT, refused, sniff

# What a file of a split is called, up to the first dot, '-' or '_', if the splits are published: train.jsonl, dev.tsv.
NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation"}
NAMES |= {"test": "test"}


class PairFiles:
    """Pairs of local files. Files that are named train, dev (or valid, validation) and test are these splits, if there is a
    train and a validation file. Otherwise the hash of a source decides its pair's split, so equal sources share a split."""

    what = "pairs"  # in messages
    option = "config.data.objective.source_field, target_field"

    def __init__(self, path: str, source: str, target: str, tasks: tuple[str, ...] = (), links: str = "inside"):
        try:
            self.files = find_files(path, path, links)
        except UserError as error:
            if names_files(path):
                raise
            task = f", or a task: {', '.join(tasks)}{nearest(path, tasks)}" if tasks else ""
            raise UserError(f"{error}{task}") from None
        self.fields = source, target
        named = {file: NAMES.get(_word(file)) for file in self.files}
        self.by_name = {"train", "validation"} <= set(named.values()) and None not in named.values()
        self.of_split = {split: [f for f in self.files if named[f] == split or not self.by_name] for split in SPLITS}
        self.splits = tuple(split for split in SPLITS if self.of_split[split])

    def identity(self) -> dict:
        stats = [(str(path.absolute()), path.stat()) for path in self.files]
        files = [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats]
        return {"reader": READER, "fields": self.fields, "files": files, "by_name": self.by_name}

    def pairs(self, split: str) -> Iterator[tuple[bytes, bytes]]:
        """(source, target) in UTF-8, in the order of the files."""
        for path in self.of_split[split]:
            for source, target in self._read(path):
                if self.by_name or split_of(source) == split:
                    yield source, target

    def _read(self, path: Path) -> Iterator[tuple[bytes, bytes]]:
        file_format = sniff(path)
        if file_format.kind not in READERS:
            raise refused(path, file_format, f"{self.what} must be in {READABLE}")
        empty = True
        for where, row in READERS[file_format.kind](path, file_format, *self.fields, option=self.option):
            empty = False
            yield self.pair_of(row, where)
        if empty:
            raise UserError(f"{path}: {WHAT[file_format.kind]} without a row")

    def pair_of(self, row, where: str) -> tuple[bytes, bytes]:
        """The pair of a row, which stands at the place `where`."""
        source, target = (text_of(row, where, field, self.option) for field in self.fields)
        return source, target

    def documents(self, split: str) -> Iterator[bytes]:
        for pair in self.pairs(split):
            yield from pair

    def n_bytes(self, split: str) -> int:
        """An estimate: of files that are split by hash, nearly all of them is for training."""
        return self._sizes[split]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {split: sum(path.stat().st_size for path in files) for split, files in self.of_split.items()}


def _word(path: Path) -> str:
    """'train' of 'train-00001.jsonl.gz'."""
    name = path.name.lower()
    return name[: min((name.index(mark) for mark in ".-_" if mark in name), default=len(name))]
