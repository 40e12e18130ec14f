"""Files of arrays (.npz) without compression, so that reading one takes no more memory than it has bytes."""

import io
import math
import zipfile
from collections.abc import Mapping

import numpy as np

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_bytes, write_bytes

LARGEST = 1 << 40  # bytes of a file: it is bounded by the disk alone


def write_arrays(path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays for `read_arrays`, whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_bytes(path, buffer.getvalue())


def read_arrays(path) -> dict[str, np.ndarray]:
    """{name: array} of a file that `write_arrays` wrote. Raises UserError if it is compressed, damaged or cannot be read."""
    try:
        content = read_bytes(path, LARGEST)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > len(content):
                raise ValueError("its arrays are larger than the file, so it is compressed")
            return {entry.filename.removesuffix(".npy"): _array(archive.read(entry)) for entry in entries}
    except (OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _array(content: bytes) -> np.ndarray:
    """The array in a .npy file. Raises ValueError if its header promises more than there is: NumPy would allocate that."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read_header:
        raise ValueError(f"an array of version {version} of NumPy's format")
    shape, _, dtype = read_header[version](stream)
    if math.prod(shape) * dtype.itemsize > len(content):
        raise ValueError(f"an array of {dtype}{list(shape)} in {len(content):,} bytes")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)
