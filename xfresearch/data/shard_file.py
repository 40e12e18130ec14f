"""The tokens of one split in a shard: an ArrayRecord file with records of RECORD tokens, then the number of tokens of each
document, then, of whole documents, the rows that they are packed in."""

from array import array
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from xfresearch.data import packing
from xfresearch.data.packing import Rows
from xfresearch.data.row_file import RowFile, RowWriter

RECORD = 4096  # tokens: less would take more space, more would take longer to read at random


class TokenWriter:
    """Writes the tokens of a split, document by document."""

    def __init__(self, path: Path, dtype):
        self.dtype = np.dtype(dtype)
        self.sizes = array("q")  # tokens of each document
        self._file = RowWriter(path)
        self._waiting: list[np.ndarray] = []
        self._count = 0  # tokens that wait to fill a record

    def begin(self) -> None:
        self.sizes.append(0)

    def write(self, ids) -> None:
        """Adds tokens to the document that has begun."""
        self._waiting.append(np.asarray(ids, self.dtype))
        self._count += len(ids)
        self.sizes[-1] += len(ids)
        if self._count >= RECORD:
            self._flush(self._count // RECORD * RECORD)

    def _flush(self, until: int) -> None:
        tokens = np.concatenate(self._waiting)
        for start in range(0, until, RECORD):
            self._file.write(tokens[start : min(start + RECORD, until)].tobytes())
        self._waiting, self._count = [tokens[until:]], len(tokens) - until

    def close(self, length: int) -> dict[str, Any]:
        """Finishes the file. With a `length`, also packs the documents in rows of it. Returns what TokenFile needs."""
        if self._count:
            self._flush(self._count)
        sizes = np.frombuffer(self.sizes, np.int64)
        self._file.write(sizes.astype(np.uint32).tobytes())
        rows = packing.document_rows(sizes, length) if length else ()
        for values in rows:
            self._file.write(values.tobytes())
        self._file.close()
        counts = {"n_tokens": int(sizes.sum()), "n_documents": len(sizes)}
        return counts | {"dtype": self.dtype.name, "digest": self._file.digest}


class TokenFile:
    """Reads what TokenWriter has written; `meta` is what its `close` returned."""

    def __init__(self, path: Path, meta: dict[str, Any]):
        self._file, self.meta, self.dtype = RowFile(path), meta, np.dtype(meta["dtype"])
        self._records = -(-meta["n_tokens"] // RECORD)

    def tokens(self) -> np.ndarray:
        """All tokens in order."""
        return np.frombuffer(b"".join(self._file.read(range(self._records))), self.dtype)

    def read(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The tokens of pieces, one after the other."""
        first, last = starts // RECORD, (starts + lengths - 1) // RECORD
        counts = last - first + 1
        every = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        needed = np.unique(every)
        tokens = np.frombuffer(b"".join(self._file.read(needed)), self.dtype)
        at = np.searchsorted(needed, first) * RECORD + starts % RECORD
        return tokens[np.repeat(at - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())]

    @cached_property
    def sizes(self) -> np.ndarray:
        """The tokens of each document, uint32."""
        return np.frombuffer(self._file.read([self._records])[0], np.uint32)

    @cached_property
    def stored_rows(self) -> Rows:
        """The rows of whole documents."""
        return Rows(*(np.frombuffer(each, np.int64) for each in self._file.read(self._records + 1 + np.arange(3))))
