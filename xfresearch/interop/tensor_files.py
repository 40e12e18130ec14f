"""The safetensors format: eight bytes that say how long the header is, the header, then the tensors' bytes.

The header is JSON: {name: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}}, offsets counted from its end.
Tensors are read and written one by one with plain reads and writes: a file that is mapped into memory would count as the
process's own.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16
import numpy as np

from xfresearch.errors import UserError

DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
METADATA = "__metadata__"
ALIGNMENT = 8  # bytes; the header is padded with spaces to a multiple
PIECE = 1 << 20  # bytes compared at once


class Stored(NamedTuple):
    """A tensor in a file: `bytes` of it from `begin` on. `dtype` is NumPy's name, or the file's where `read` refuses it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    bytes: int

    def require_dtype(self) -> None:
        """UserError where no weights have its dtype: integers and eight bits are a quantised model's."""
        if self.dtype not in DTYPES.values():
            allowed = ", ".join(DTYPES)
            raise UserError(f"{self.file}: tensor {self.name} has dtype {self.dtype}: it must be one of {allowed}")

    def read(self) -> np.ndarray:
        tensor = np.empty(self.shape, self.dtype)
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            count = stream.readinto(tensor.reshape(-1).view(np.uint8))
        if count != self.bytes:
            raise UserError(f"{self.file}: tensor {self.name} ends after {count:,} of its {self.bytes:,} bytes")
        return tensor

    def equals(self, other: "Stored") -> bool:
        """Whether `other` is the same tensor bit for bit; a piece of each at a time is in memory."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        with self.file.open("rb") as mine, other.file.open("rb") as theirs:
            mine.seek(self.begin), theirs.seek(other.begin)
            pieces = [min(PIECE, self.bytes - start) for start in range(0, self.bytes, PIECE)]
            return all(mine.read(size) == theirs.read(size) for size in pieces)


class Outgoing(NamedTuple):
    """A tensor to be written; `make` is called when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def stored_in(file: Path) -> Iterator[Stored]:
    """The tensors of a file. UserError where it is not a whole safetensors file."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 8 + length <= size else None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{file}: not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise UserError(f"{file}: not a whole safetensors file: it ends within its header, at {size:,} bytes")
    for name, entry in header.items():
        if name != METADATA:
            yield _stored(file, name, entry, 8 + length, size)


def _stored(file: Path, name: str, entry, start: int, size: int) -> Stored:
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in [*shape, begin, end - begin])
    except (TypeError, ValueError, KeyError):
        whole = False
    if not whole:
        raise UserError(f"{file}: not a safetensors file: its header does not say where tensor {name} is")
    size_of_one = np.dtype(DTYPES[kind]).itemsize if kind in DTYPES else None
    if size_of_one and end - begin != math.prod(shape) * size_of_one:
        raise UserError(f"{file}: tensor {name} of shape {shape} and dtype {kind} has {end - begin:,} bytes")
    if start + end > size:
        raise UserError(f"{file}: cut off: tensor {name} ends at byte {start + end:,} of a file of {size:,}")
    return Stored(file, name, tuple(shape), DTYPES.get(kind, kind), start + begin, end - begin)


def write(file: Path, tensors: list[Outgoing], progress: Callable[[int], None] = lambda bytes: None) -> None:
    """Writes a file of `tensors`, each made, written and let go before the next; calls `progress(bytes)` after each."""
    names = {dtype: kind for kind, dtype in DTYPES.items()}
    header, end = {METADATA: {"format": "pt"}}, 0  # 'pt' is what `transformers` asks for
    for tensor in tensors:
        begin, end = end, end + tensor.bytes
        header[tensor.name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            stream.write(np.ascontiguousarray(tensor.make()).reshape(-1).view(np.uint8))
            progress(tensor.bytes)
