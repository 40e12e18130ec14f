"""Reads compressed files as streams: gzip, zstandard, bzip2 and xz. Their first bytes tell them apart, not their names.

zstandard is read by pyarrow: the `zstandard` library's stream ends silently where a file was cut. Memory is bounded: a file
that was made with a window of more than WINDOW is refused. A file that grows to more than FREE bytes and to more than RATIO
times its size is refused, too: no text does, and a small file could fill the memory or the disk.
"""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.opening import open_to_read

_CHUNK = 1 << 16
WINDOW = 1 << 27  # bytes; pyarrow has the same limit
RATIO, FREE = 200, 1 << 28
MAGIC = {
    "gzip": rb"\x1f\x8b\x08",
    "zstandard": rb"(?:\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)",  # a frame, or one that readers skip
    "bzip2": rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)",
    "xz": rb"\xfd7zXZ\x00",
}
SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


def compression_of(head: bytes) -> str:
    """The compression of a file that begins with `head`: a name of MAGIC, or '' for none."""
    return next((name for name, magic in MAGIC.items() if re.match(magic, head)), "")


@contextmanager
def opened(path, compression: str) -> Iterator[BinaryIO]:
    """The decompressed content of a file. Raises UserError for a file that cannot be read, or is damaged."""
    try:
        with open_to_read(path) as file:
            if not compression:
                yield file
                return
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            with _stream(file, compression) as stream:
                yield io.BufferedReader(Chunks(_bounded(stream, path, size)))
    except _ERRORS as error:
        raise _damaged(path, error) from None
    except OSError as error:  # pyarrow's and bzip2's errors of content have no number
        if compression and error.errno is None:
            raise _damaged(path, error) from None
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def _damaged(path, error: Exception) -> UserError:
    if "too much memory" in str(error) or "limit exceeded" in str(error):  # of zstandard, of xz
        return UserError(f"{path}: it needs a window of more than {WINDOW >> 20} MiB: compress it with a smaller one")
    return UserError(f"{path}: the compressed file is damaged: {error}")


def _stream(file: BinaryIO, compression: str) -> io.BufferedIOBase:
    if compression == "zstandard":
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd")
        return io.BufferedReader(Chunks(iter(partial(stream.read, _CHUNK), b"")))
    if compression == "xz":
        return io.BufferedReader(Chunks(_xz(file)))
    return gzip.open(file) if compression == "gzip" else bz2.open(file)


class Chunks(io.RawIOBase):
    """A file whose content is that of an iterator of bytes."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks = chunks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _bounded(stream: io.BufferedIOBase, path, size: int) -> Iterator[bytes]:
    """The content of a stream, up to what a compressed file of `size` bytes may hold. Raises UserError if there is more."""
    most = max(FREE, RATIO * size)
    while chunk := stream.read(_CHUNK):
        most -= len(chunk)
        if most < 0:
            much = f"more than {RATIO} times its size ({size:,} bytes)"
            raise UserError(f"{path}: it decompresses to {much}: decompress it first")
        yield chunk


def _xz(file: BinaryIO) -> Iterator[bytes]:
    """The content of the streams of a .xz file. Unlike lzma.open, a header that asks for much memory is an error."""
    chunk = file.read(_CHUNK)
    while chunk:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=WINDOW + (1 << 20))
        while not stream.eof:
            if stream.needs_input and not chunk:
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            yield stream.decompress(chunk, _CHUNK)
            chunk = file.read(_CHUNK) if stream.needs_input else b""
        chunk = stream.unused_data or file.read(_CHUNK)
        while chunk and not chunk.strip(b"\0"):  # zeros may follow a stream
            chunk = file.read(_CHUNK)
        chunk = chunk.lstrip(b"\0")
