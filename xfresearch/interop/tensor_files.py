"""The safetensors format: the header's length in eight bytes, the header, then the tensors' bytes.

The header is JSON: {name: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}}, offsets from the header's
end. Tensors are read and written one by one with plain reads and writes, because the pages of a memory-mapped file
would count as memory of the process. The safetensors library, the reference, checks every header before a tensor is
read: its tensors must tile the file without gaps or overlaps.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from safetensors import SafetensorError, safe_open

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.formats import refused, sniff
from xfresearch.runtime.opening import name_of, open_to_read

DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}  # bits
BLOCK = 1 << 16  # values that are tested at a time, which the processor's cache holds
METADATA = "__metadata__"
ALIGNMENT = 8  # bytes; the header is padded with spaces to a multiple of it
CHUNK = 1 << 20  # bytes compared at a time
MAX_HEADER = 100_000_000  # bytes; the limit of the reference


class StoredTensor(NamedTuple):
    """A tensor in a file: `bytes` bytes from offset `begin`.

    dtype: NumPy's name, or the file's own name if the dtype is not supported.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    bytes: int

    def require_dtype(self) -> None:
        """Raises UserError if the dtype is not supported. Integer and 8-bit tensors belong to quantized models."""
        if self.dtype not in DTYPES.values():
            allowed = ", ".join(DTYPES)
            raise UserError(f"{self.file}: tensor {self.name} has dtype {self.dtype}: it must be one of {allowed}")

    def read(self) -> np.ndarray:
        tensor = np.empty(self.shape, self.dtype)
        with open_to_read(self.file) as stream:
            stream.seek(self.begin)
            count = stream.readinto(tensor.reshape(-1).view(np.uint8).data)
        if count != self.bytes:
            raise UserError(f"{self.file}: truncated: tensor {self.name} has {count:,} of its {self.bytes:,} bytes")
        return tensor

    def equals(self, other: "StoredTensor") -> bool:
        """Whether `other` is bitwise equal. Holds only one chunk of each tensor in memory at a time."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        with open_to_read(self.file) as mine, open_to_read(other.file) as theirs:
            mine.seek(self.begin)
            theirs.seek(other.begin)
            sizes = [min(CHUNK, self.bytes - start) for start in range(0, self.bytes, CHUNK)]
            return all(mine.read(size) == theirs.read(size) for size in sizes)


def count_nonfinite(tensor: np.ndarray) -> int:
    """The number of values that are NaN or infinite: their exponent has only ones. NumPy's own test is slow for bfloat16."""
    bits = tensor.reshape(-1).view(f"uint{8 * tensor.itemsize}")
    mask = bits.dtype.type(EXPONENTS[tensor.dtype.name])
    parts = (bits[start : start + BLOCK] for start in range(0, bits.size, BLOCK))
    return sum(int(np.count_nonzero((part & mask) == mask)) for part in parts)


class PendingTensor(NamedTuple):
    """A tensor to be written. `make` builds it just before it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def tensors_in(file: Path) -> Iterator[StoredTensor]:
    """The tensors of a file. Raises UserError if it is not a complete safetensors file."""
    try:
        with open_to_read(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            complete = 8 + length <= size and length <= MAX_HEADER
            header = json.loads(stream.read(length), object_pairs_hook=_unique) if complete else None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    except DuplicateKey as error:
        raise UserError(f"{file}: not a safetensors file: its header has two entries {error}") from None
    except (ValueError, RecursionError):
        _check_kind(file)
        raise UserError(f"{file}: not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        _check_kind(file)
        raise UserError(
            f"{file}: not a complete safetensors file: its header is truncated or not an object ({size:,} bytes)"
        )
    stored = [_stored(file, name, entry, 8 + length, size) for name, entry in header.items() if name != METADATA]
    try:
        with open_to_read(file) as stream, safe_open(name_of(stream), "np"):
            pass
    except SafetensorError as error:
        raise UserError(f"{file}: not a safetensors file: {error}") from None
    yield from stored


def _check_kind(file: Path) -> None:
    """Raises UserError for a file of another kind, which it names."""
    file_format = sniff(file)
    if file_format.kind not in ("safetensors", "binary", "misnamed"):
        raise refused(file, file_format, "it must be a safetensors file")


class DuplicateKey(ValueError):
    """A key that a JSON object has twice. JSON parsers differ in which value they take."""


def _unique(pairs: list[tuple]) -> dict:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise DuplicateKey(repr(next(name for name in counts if counts[name] > 1)))
    return entries


def _stored(file: Path, name: str, entry, start: int, size: int) -> StoredTensor:
    try:
        dtype = entry["dtype"]
        shape = entry["shape"]
        begin, end = entry["data_offsets"]
        valid = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in [*shape, begin, end - begin])
    except (TypeError, ValueError, KeyError):
        valid = False
    if not valid:
        raise UserError(f"{file}: not a safetensors file: its header has no valid entry for tensor {name}")
    itemsize = np.dtype(DTYPES[dtype]).itemsize if dtype in DTYPES else None
    if itemsize and end - begin != math.prod(shape) * itemsize:
        raise UserError(
            f"{file}: tensor {name} of shape {shape} and dtype {dtype} has {end - begin:,} bytes: "
            f"it must have {math.prod(shape) * itemsize:,}"
        )
    if start + end > size:
        raise UserError(
            f"{file}: truncated: tensor {name} ends at byte {start + end:,}, but the file has {size:,} bytes"
        )
    return StoredTensor(file, name, tuple(shape), DTYPES.get(dtype, dtype), start + begin, end - begin)


def write(file: Path, tensors: list[PendingTensor], progress: Callable[[int], None] = lambda bytes: None) -> None:
    """Writes a file of `tensors`, building and freeing them one by one. Calls `progress(bytes)` after each."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, dict] = {METADATA: {"format": "pt"}}  # `transformers` requires 'pt'
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.bytes
        header[tensor.name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            stream.write(np.ascontiguousarray(tensor.make()).reshape(-1).view(np.uint8).data)
            progress(tensor.bytes)
