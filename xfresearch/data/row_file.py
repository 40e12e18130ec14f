"""The rows of a split in an ArrayRecord file: written once, read by number."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xfresearch.data.cache import read_meta
from xfresearch.data.order import OnePart

ROWS = "rows.array_record"  # in the directory of a RowSplit


class RowWriter:
    """Writes rows in order, and has their number and digest."""

    def __init__(self, path: Path):
        from array_record.python.array_record_module import ArrayRecordWriter

        # snappy takes a third of the time of zstd, and leaves less than the two bytes that a token of a BPE has
        self._writer = ArrayRecordWriter(str(path), "group_size:1,snappy")
        self._content = hashlib.sha256()
        self.count = 0

    def write(self, row: bytes) -> None:
        self._writer.write(row)
        self._content.update(row)
        self.count += 1

    def close(self) -> None:
        self._writer.close()

    @property
    def digest(self) -> str:
        return self._content.hexdigest()


class RowFile:
    """Reads rows by number. The file is opened at the first one."""

    def __init__(self, path: Path):
        self._path = path

    def read(self, indices) -> list[bytes]:
        return self._reader.read([int(i) for i in indices]) if len(indices) else []

    @cached_property
    def _reader(self) -> Any:
        from array_record.python.array_record_module import ArrayRecordReader

        # ArrayRecordDataSource starts threads at every call, which takes three times as long for a small batch.
        return ArrayRecordReader(str(self._path), options="readahead_buffer_size:0,max_parallelism:0")


class RowSplit(OnePart):
    """A split whose rows are in the file ROWS of a directory of the cache, beside their meta. Its classes unpack them."""

    byte_scale = 1.0

    def __init__(self, directory: Path):
        self.directory, self.meta = directory, read_meta(directory)
        self.digest = self.meta["digest"]
        self._rows = RowFile(directory / ROWS)

    def __len__(self) -> int:
        return self.meta["n_sequences"]

    def records(self, indices, *shape: int) -> np.ndarray:
        """int32 [n, *shape]: rows by number."""
        found = self._rows.read(indices)
        return np.frombuffer(b"".join(found), np.int32).reshape(len(found), *shape)
