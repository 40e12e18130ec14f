"""Attention cut over eight simulated devices equals one device, gradients included; all cases in one process."""

import json
import os
import subprocess
import sys

import pytest

from tests.contracts.variants import ROOT
from tests.kernels.mesh_worker import CASES, DTYPES
from tests.tolerances import TOLERANCE


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.kernels.mesh_worker"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_attention_on_a_mesh_is_that_of_one_device(errors, name):
    assert errors[name] < TOLERANCE[DTYPES[CASES[name][0]]]
