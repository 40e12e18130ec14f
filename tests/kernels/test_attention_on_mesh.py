"""Attention sharded over eight simulated devices equals attention on one device. One process runs all cases."""

import json
import os
import subprocess
import sys

import pytest

from tests.contracts.variants import ROOT
from tests.kernels.mesh_worker import CASES, DTYPES, MODELS
from tests.tolerances import TOLERANCE

TEST = "test_attention_on_a_mesh_equals_attention_on_one_device"
DAILY = ("splash, memory, documents, window", "ring, memory, documents, window", "llama by ring")
DAILY += ("cudnn, one key-value head",)


@pytest.fixture(scope="module")
def results(request) -> dict[str, dict]:
    names = [item.callspec.params["name"] for item in request.session.items if item.originalname == TEST]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.kernels.mesh_worker", *names]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.long) for name in CASES | MODELS]
)
def test_attention_on_a_mesh_equals_attention_on_one_device(results, name):
    """Output and gradients. `ring` rotates the keys; the other kernels gather them."""
    found = results[name]
    kernel, mesh, *_ = (CASES | MODELS)[name]
    assert found["error"] < TOLERANCE[DTYPES[kernel]]
    if name in CASES and kernel.startswith("ring"):
        assert found["passes"] > 0 and found["gathers"] == 0
    if name in CASES and not kernel.startswith("ring") and "context" in mesh:
        assert found["gathers"] > 0
