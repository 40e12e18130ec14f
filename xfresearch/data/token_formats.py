"""Files of token ids that other programs wrote: where the ids are in them, and where documents end. Nothing is copied.

A format is found by what its file begins with, then by the file beside it, else it is raw ids. A new one is a function of
(path, file, size) in `_FORMATS`, which returns None for a file of another format.
"""

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, inside, read_bytes
from xfresearch.runtime.formats import BROKEN, refused, sniff
from xfresearch.runtime.opening import open_to_read

SUFFIXES = (".bin", ".npy", ".ds")
_REFUSED = (*BROKEN, "pickle", "zip", "gguf", "safetensors", "adapter", "llama2.c", "hdf5")
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic number: version, type of the ids
_LLM_C_HEADER = 1024  # bytes
_MEGATRON = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # the others are no integers
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_LOOKED_AT = 1 << 16  # bytes, to tell two bytes an id from four
_HIGHEST = 16  # the upper half of an id of four bytes is less, with a vocabulary of less than 2^20


class TokenIds(NamedTuple):
    """The ids of a file, a memory map int[n]; `ends`, where its documents end, ascending, or None if the format does not
    tell; `leads`: the token between documents belongs to the later one."""

    ids: np.ndarray
    ends: np.ndarray | None = None
    leads: bool = False


def open_tokens(path: Path) -> TokenIds:
    """Raises UserError for a file that holds no token ids, or whose length or document ends are not those that it states."""
    file_format = sniff(path)
    if file_format.kind in _REFUSED or file_format.compression:
        raise refused(path, file_format, f"it must be a file of token ids, {', '.join(SUFFIXES)}, not compressed")
    with open_to_read(path) as file:
        size = file.seek(0, io.SEEK_END)
        found = (read(path, file, size) for read in _FORMATS)
        tokens = next(each for each in found if each)
    if tokens.ends is not None:
        _check_ends(path, tokens)
    return tokens


def beside(path: Path) -> list[Path]:
    """The files that say more about the ids of a file, those that are there."""
    named = (path.with_suffix(".idx"), path.with_name(f"{path.name}.index"), path.with_name(f"{path.name}.metadata"))
    return [each for each in named if exists(each)]


def _check_ends(path: Path, tokens: TokenIds) -> None:
    ends = tokens.ends
    assert ends is not None
    last = int(ends[-1]) if len(ends) else 0
    if last != len(tokens.ids) or np.any(ends[1:] < ends[:-1]):
        where = f"its documents end at token {last:,}, and it has {len(tokens.ids):,}"
        raise UserError(f"{path}: {where}: the file beside it belongs to another, or one of them was cut")


def _map(path: Path, file: BinaryIO, dtype: str, first: int, last: int) -> np.ndarray:
    """The integers of the bytes first to last - 1 of a file, as a memory map."""
    kind = np.dtype(dtype)
    if last <= first or (last - first) % kind.itemsize:
        raise UserError(f"{path}: {last - first:,} bytes are no whole number of ids of {kind.itemsize} bytes: it was cut")
    return np.memmap(file, kind, "r", first, ((last - first) // kind.itemsize,))


def _llm_c(path: Path, file: BinaryIO, size: int) -> TokenIds | None:
    """llm.c and modded-nanogpt: 256 int32, the first three a magic number, a version and the number of ids."""
    file.seek(0)
    head = np.frombuffer(file.read(12), "<i4")
    if len(head) < 3 or int(head[0]) not in _LLM_C:
        return None
    version, dtype = _LLM_C[int(head[0])]
    if head[1] != version:
        raise UserError(f"{path}: a file of llm.c of version {head[1]}: it must be {version}")
    wanted = _LLM_C_HEADER + int(head[2]) * np.dtype(dtype).itemsize
    if size != wanted:
        raise UserError(f"{path}: its header states {head[2]:,} tokens, {wanted:,} bytes; it has {size:,}: it was cut")
    return TokenIds(_map(path, file, dtype, _LLM_C_HEADER, size), leads=True)


def _numpy(path: Path, file: BinaryIO, size: int) -> TokenIds | None:
    """A NumPy array of one dimension."""
    file.seek(0)
    if file.read(6) != np.lib.format.MAGIC_PREFIX:
        return None
    file.seek(0)
    try:
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, _, dtype = read[np.lib.format.read_magic(file)[0]](file)
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: a damaged NumPy array: {error}") from None
    if dtype.kind not in "ui" or len(shape) != 1:
        raise UserError(f"{path}: a NumPy array {dtype}{list(shape)}: token ids must be integers, in one dimension")
    first = file.tell()
    if size - first != shape[0] * dtype.itemsize:
        raise UserError(f"{path}: its header states {shape[0]:,} tokens, and it has {size - first:,} bytes: it was cut")
    return TokenIds(_map(path, file, dtype.str, first, size))


def _megatron(path: Path, file: BinaryIO, size: int) -> TokenIds | None:
    """Megatron: raw ids, and a file .idx with their type, the lengths of the sequences, their places and those of documents
    among them."""
    index = inside(path.parent, path.with_suffix(".idx").name)
    if path.suffix != ".bin" or not exists(index):
        return None
    with open_to_read(index) as beside_it:
        head = beside_it.read(_MEGATRON_HEADER.size)
        if len(head) < _MEGATRON_HEADER.size or not head.startswith(b"MMIDIDX\0\0"):
            raise UserError(f"{index}: it must be an index of Megatron, which begins with MMIDIDX")
        _, version, code, sequences, documents = _MEGATRON_HEADER.unpack(head)
        if version != 1 or code not in _MEGATRON:
            raise UserError(f"{index}: version {version}, type {code}: it must be version 1 with ids that are integers")
        places = [len(head), len(head) + 4 * sequences, len(head) + 12 * sequences]
        length = beside_it.seek(0, io.SEEK_END)
        if length != places[2] + 8 * documents or not documents:
            raise UserError(f"{index}: it has {length:,} bytes, not those of {sequences:,} sequences: it was cut")
        lengths = np.memmap(beside_it, "<i4", "r", places[0], (sequences,))
        starts = np.memmap(beside_it, "<i8", "r", places[1], (sequences,))
        firsts = np.memmap(beside_it, "<i8", "r", places[2], (documents,))
    kind = np.dtype(_MEGATRON[code])
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if np.any(starts != before[:-1] * kind.itemsize):
        raise UserError(f"{index}: the sequences do not follow one another in {path.name}: write them again in order")
    if np.any((firsts < 0) | (firsts > sequences)):
        raise UserError(f"{index}: a document begins at a sequence that is none of its {sequences:,}")
    ends = before[firsts]
    return TokenIds(_map(path, file, kind.str, 0, size), ends[1:] if ends[0] == 0 else ends)


def _datatrove(path: Path, file: BinaryIO, size: int) -> TokenIds | None:
    """datatrove: raw ids, a file .index with the ends of documents, and .metadata: the tokenizer, | and the bytes of an
    id."""
    index = inside(path.parent, f"{path.name}.index")
    if path.suffix != ".ds" or not exists(index):
        return None
    with open_to_read(index) as beside_it:
        ends = _map(Path(index), beside_it, "<u8", 0, beside_it.seek(0, io.SEEK_END))
    about = inside(path.parent, f"{path.name}.metadata")
    width = read_bytes(about).partition(b"\n")[0].rpartition(b"|")[2].strip() if exists(about) else b""
    dtype = {b"2": "<u2", b"4": "<u4"}.get(width) or _width(file)
    return TokenIds(_map(path, file, dtype, 0, size), ends)


def _raw(path: Path, file: BinaryIO, size: int) -> TokenIds:
    """nanoGPT's .bin and OLMo's .npy: ids of two bytes, or of four if the upper half of each is almost nothing."""
    return TokenIds(_map(path, file, _width(file), 0, size))


def _width(file: BinaryIO) -> str:
    file.seek(0)
    head = file.read(_LOOKED_AT)
    upper = np.frombuffer(head[: len(head) // 4 * 4], "<u2")[1::2]
    return "<u4" if len(upper) and upper.max() < _HIGHEST else "<u2"


_FORMATS: tuple[Callable[[Path, BinaryIO, int], TokenIds | None], ...] = (_numpy, _llm_c, _megatron, _datatrove, _raw)
