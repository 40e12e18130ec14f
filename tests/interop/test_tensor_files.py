"""The safetensors format, compared with the safetensors library, and blocked copies, compared with NumPy."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from xfresearch.errors import UserError
from xfresearch.interop.copying import BLOCK, copy
from xfresearch.interop.tensor_files import PendingTensor, tensors_in, write

DTYPES = ("float16", "bfloat16", "float32", "float64")


def tensors() -> dict[str, np.ndarray]:
    """Tensors of every dtype, including empty ones, a scalar, and one whose name JSON must escape."""
    random = np.random.default_rng(0)
    found = {
        f"{dtype}.{shape}": random.normal(size=shape).astype(dtype)
        for dtype in DTYPES
        for shape in [(3, 5), (0, 2), (7,)]
    }
    return found | {'é"\\': random.normal(size=(2, 3, 4)).astype(np.float32), "scalar": np.array(0.5, np.float32)}


def test_the_library_reads_our_files(tmp_path):
    wanted = tensors()
    progress = []
    pending = [PendingTensor(name, x.shape, x.dtype.name, lambda x=x: x) for name, x in wanted.items()]
    write(tmp_path / "a.safetensors", pending, progress.append)
    found = load_file(tmp_path / "a.safetensors")
    assert list(found) and found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].tobytes() == tensor.tobytes()
    assert progress == [tensor.nbytes for tensor in wanted.values()]
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_the_files_of_the_library(tmp_path):
    wanted = tensors()
    save_file(wanted, tmp_path / "a.safetensors", {"format": "pt"})
    found = {stored.name: stored for stored in tensors_in(tmp_path / "a.safetensors")}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        read = found[name].read()
        assert (read.dtype, read.shape, read.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())
        assert found[name].bytes == tensor.nbytes


def test_transposed_tensors_are_written_in_row_major_order(tmp_path):
    tensor = np.arange(12, dtype=np.float32).reshape(3, 4).T
    write(tmp_path / "a", [PendingTensor("a", tensor.shape, "float32", lambda: tensor)])
    np.testing.assert_array_equal(load_file(tmp_path / "a")["a"], tensor)


def test_a_tensor_truncated_after_its_header_was_read_is_named(tmp_path):
    file = tmp_path / "a.safetensors"
    save_file({"a": np.zeros(100, np.float32)}, file)
    stored = next(tensors_in(file))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=f"{file}: truncated: tensor a has 392 of its 400 bytes"):
        stored.read()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_header_raises_only_one_line_user_errors(tmp_path_factory, data):
    """Any bytes of the header may change: either the file can still be read, or UserError is raised."""
    file = tmp_path_factory.mktemp("damaged") / "a.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)}, file)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 40))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        for stored in tensors_in(file):
            stored.require_dtype()
            stored.read()
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "shape", [(), (3,), (1, 5), (BLOCK, 3), (2 * BLOCK + 1, 7), (3, BLOCK + 2, 5), (2, 3, 4, BLOCK + 1)]
)
def test_blocked_copies_equal_numpy(shape, dtype):
    """For every order of the dimensions of the source and of the target."""
    values = np.random.default_rng(0).normal(size=shape).astype(dtype)
    for order in itertools.permutations(range(len(shape))):
        transposed = values.transpose(order)
        target = np.full(transposed.shape, np.nan, np.float32)
        copy(target, transposed)
        np.testing.assert_array_equal(target, transposed.astype(np.float32))
        back = np.full(shape, np.nan, np.float32)
        copy(back.transpose(order), np.ascontiguousarray(transposed))
        np.testing.assert_array_equal(back, values.astype(np.float32))
