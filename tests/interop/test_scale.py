"""Import and export of a 2 GB checkpoint need the memory of one tensor besides this host's share of the parameters.

Memory is measured in separate processes (scale_worker.py) and compared with the largest tensor in its file's dtype.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from safetensors import safe_open

from tests.training.processes import ROOT, Processes
from xfresearch.benchmarks import import_hf
from xfresearch.interop.folder import stored_tensors

pytestmark = pytest.mark.long
BOUND = 1.2  # times the largest tensor, in addition to this host's share of the parameters
GIGABYTES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random bfloat16 Llama in files of up to 500 MB. Its largest tensors are the embedding and the head."""
    path = tmp_path_factory.mktemp("scale") / "llama"
    import_hf.write_random(path, import_hf.llama(width=1536, layers=18, vocab=128_256), "bfloat16", shard_bytes=5 * 10**8)
    tensors = stored_tensors(path)
    assert sum(tensor.bytes for tensor in tensors.values()) > GIGABYTES * 10**9
    assert len({tensor.file for tensor in tensors.values()}) > 3
    yield path
    for file in path.iterdir():
        file.unlink()


def result_of(output: str) -> dict:
    return json.loads(re.search(r"RESULT (.*)", output)[1])


def check_import(result: dict, share_of_whole: float) -> None:
    taken = result["import"]
    assert result["share"] < 1.02 * share_of_whole * result["whole"]
    assert taken["looks"] > 100
    assert taken["peak"] < BOUND * result["largest"] + result["share"], result
    assert taken["anonymous"] < BOUND * result["largest"] + result["share"], result
    assert taken["peak"] > 0.95 * result["share"]  # otherwise the measurement failed


@pytest.mark.parametrize("devices", [1, 8])
def test_memory_of_one_process(folder, tmp_path, devices):
    """On one device and sharded over eight. Export reproduces every tensor."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    command = [
        sys.executable,
        "-m",
        "tests.interop.scale_worker",
        "--folder",
        str(folder),
        "--out",
        str(tmp_path / "out"),
    ]
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = result_of(done.stderr)
    assert result["devices"] == devices
    check_import(result, 1)
    assert result["export"]["peak"] < BOUND * result["largest"], result
    assert_same_tensors(folder, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()


def assert_same_tensors(folder, other) -> None:
    before, after = stored_tensors(folder), stored_tensors(other)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        with safe_open(tensor.file, "np") as a, safe_open(after[name].file, "np") as b:
            assert a.get_tensor(name).tobytes() == b.get_tensor(name).tobytes(), name


def test_memory_of_each_of_two_processes(folder):
    with Processes(2, "tests.interop.scale_worker", "--folder", str(folder)) as both:
        for _, _, output in both.succeed():
            result = result_of(output)
            assert result["devices"] == 2
            check_import(result, 1 / 2)
