"""The safetensors format, compared with the safetensors library, and blocked copies, compared with NumPy."""

import itertools
import json
import math
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from xfresearch.interop.copying import BLOCK, copy
from xfresearch.interop.tensor_files import MAX_HEADER, PendingTensor, tensors_in, write
from xfresearch.runtime.errors import UserError

DTYPES = ("float16", "bfloat16", "float32", "float64")


def tensors() -> dict[str, np.ndarray]:
    """Tensors of every dtype, including empty ones, a scalar, and one whose name JSON must escape."""
    random = np.random.default_rng(0)
    by_name = {
        f"{dtype}.{shape}": random.normal(size=shape).astype(dtype)
        for dtype in DTYPES
        for shape in [(3, 5), (0, 2), (7,)]
    }
    return by_name | {'é"\\': random.normal(size=(2, 3, 4)).astype(np.float32), "scalar": np.array(0.5, np.float32)}


def test_the_library_reads_our_files(tmp_path):
    wanted = tensors()
    progress = []
    pending = [PendingTensor(name, x.shape, x.dtype.name, lambda x=x: x) for name, x in wanted.items()]
    write(tmp_path / "a.safetensors", pending, progress.append)
    result = load_file(tmp_path / "a.safetensors")
    assert list(result) and result.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (result[name].dtype, result[name].shape) == (tensor.dtype, tensor.shape)
        assert result[name].tobytes() == tensor.tobytes()
    assert progress == [tensor.nbytes for tensor in wanted.values()]
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_the_files_of_the_library(tmp_path):
    wanted = tensors()
    save_file(wanted, tmp_path / "a.safetensors", {"format": "pt"})
    by_name = {stored.name: stored for stored in tensors_in(tmp_path / "a.safetensors")}
    assert by_name.keys() == wanted.keys()
    for name, tensor in wanted.items():
        read = by_name[name].read()
        assert (read.dtype, read.shape, read.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())
        assert by_name[name].bytes == tensor.nbytes


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


def file_of(path, header: bytes, data: bytes):
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def library_accepts(file) -> bool:
    try:
        with safe_open(file, "np"):
            return True
    except SafetensorError:
        return False


FOUR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": FOUR},  # the data are longer than the tensors
        {"a": FOUR, "b": FOUR},  # two tensors overlap
        {"a": FOUR, "b": FOUR | {"data_offsets": [2, 6]}},
        {"b": FOUR | {"data_offsets": [4, 8]}},  # bytes that belong to no tensor
        {"a": FOUR | {"data_offsets": [0, 8]}},  # more bytes than the shape has
        {"a": FOUR, "b": FOUR | {"data_offsets": [4, 8], "dtype": "F31"}},
        {"a": FOUR, "b": FOUR | {"data_offsets": [4, 8]}, "__metadata__": {"a": 1}},
    ],
)
def test_tensors_must_tile_the_file(tmp_path, header):
    file = file_of(tmp_path / "a.safetensors", json.dumps(header).encode(), bytes(8))
    assert not library_accepts(file)
    with pytest.raises(UserError, match=f"^{file}: [^\n]*$"):
        next(tensors_in(file))


def test_two_entries_of_one_name_and_a_huge_header_are_refused(tmp_path):
    """JSON parsers differ in which of two equal keys they take; the format forbids them."""
    entry = json.dumps({"a": FOUR})[1:-1]
    file = file_of(tmp_path / "a.safetensors", f"{{{entry},{entry}}}".encode(), bytes(4))
    with pytest.raises(UserError, match="its header has two entries 'a'"):
        next(tensors_in(file))
    names = ",".join(json.dumps({f"a{number}": FOUR})[1:-1] for number in [*range(60_000), 59_999])
    file_of(file, f"{{{names}}}".encode(), bytes(4))
    begin = time.process_time()
    with pytest.raises(UserError, match="its header has two entries 'a59999'"):
        next(tensors_in(file))
    assert time.process_time() - begin < 5  # it takes minutes if names are counted one by one
    with file.open("wb") as stream:
        stream.write((MAX_HEADER + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER + 100)  # a sparse file, never read
    with pytest.raises(UserError, match="not a complete safetensors file"):
        next(tensors_in(file))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_we_refuse_what_the_library_refuses(tmp_path_factory, data):
    """A valid file of which up to two numbers are changed: we accept it exactly if the library does."""
    header = {}
    end = 0
    for name in data.draw(st.permutations("abc")):
        shape = data.draw(st.lists(st.integers(0, 3), max_size=2))
        dtype, size = data.draw(st.sampled_from([("F32", 4), ("BF16", 2), ("F64", 8)]))
        offsets = [end, end + math.prod(shape) * size]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        end = offsets[1]
    lists = [entry[key] for entry in header.values() for key in ("shape", "data_offsets") if entry[key]]
    for _ in range(data.draw(st.integers(0, 2))):
        changed = data.draw(st.sampled_from(lists))
        changed[data.draw(st.integers(0, len(changed) - 1))] += data.draw(st.sampled_from([-4, -1, 1, 4]))
    size = max(0, end + data.draw(st.sampled_from([0, 0, 0, -1, 1, 4])))
    order = data.draw(st.permutations("abc"))
    text = json.dumps({name: header[name] for name in order}).encode()
    file = file_of(tmp_path_factory.mktemp("random") / "a.safetensors", text, bytes(size))
    try:
        list(tensors_in(file))
        accepted = True
    except UserError as error:
        assert "\n" not in str(error)
        accepted = False
    assert accepted == library_accepts(file)


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
