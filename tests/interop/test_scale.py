"""A checkpoint of 2 GB: importing and exporting take one tensor's memory besides the parameters that this host holds.

Measured in processes of their own (scale_worker.py says how), against the largest tensor in the dtype of its file.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from safetensors import safe_open

from tests.training.processes import ROOT, Processes
from xfresearch.interop import speed
from xfresearch.interop.folder import stored_tensors

pytestmark = pytest.mark.long
BOUND = 1.2  # largest tensors, besides the share of this host
GIGABYTES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama in bfloat16 whose largest tensors are its embedding and its head, in files of up to 500 MB."""
    path = tmp_path_factory.mktemp("scale") / "llama"
    speed.write_random(path, speed.llama(width=1536, layers=18, vocab=128_256), "bfloat16", shard_bytes=5 * 10**8)
    tensors = stored_tensors(path)
    assert sum(tensor.bytes for tensor in tensors.values()) > GIGABYTES * 10**9
    assert len({tensor.file for tensor in tensors.values()}) > 3
    yield path
    for file in path.iterdir():
        file.unlink()


def result_of(said: str) -> dict:
    return json.loads(re.search(r"RESULT (.*)", said)[1])


def check_import(result: dict, share_of_whole: float) -> None:
    taken = result["import"]
    assert result["share"] < 1.02 * share_of_whole * result["whole"]
    assert taken["looks"] > 100
    assert taken["peak"] < BOUND * result["largest"] + result["share"], result
    assert taken["anonymous"] < BOUND * result["largest"] + result["share"], result
    assert taken["peak"] > 0.95 * result["share"]  # or nothing was measured


@pytest.mark.parametrize("devices", [1, 8])
def test_memory_of_one_process(folder, tmp_path, devices):
    """On one device and cut over eight; export writes what was read, tensor for tensor."""
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
        for _, _, said in both.succeed():
            result = result_of(said)
            assert result["devices"] == 2
            check_import(result, 1 / 2)
