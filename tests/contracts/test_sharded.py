"""Contract 3: sharded equals unsharded, and scanned equals unrolled. One process computes all selected variants."""

import json
import os
import subprocess
import sys

import pytest

from tests.contracts.variants import ROOT, marked
from tests.tolerances import TOLERANCE

TEST = "test_sharded_equals_unsharded"


@pytest.fixture(scope="module")
def errors(request) -> dict[str, float]:
    names = [item.callspec.params["name"] for item in request.session.items if item.originalname == TEST]
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.contracts.sharded_worker", *names]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", marked(["pattern", "configs/lambda_lm.py"]))  # experts: training/test_meshes.py
def test_sharded_equals_unsharded(errors, name):
    assert errors[name] < TOLERANCE["float64"]
