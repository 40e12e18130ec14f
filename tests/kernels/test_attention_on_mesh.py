"""Attention sharded over eight simulated devices equals attention on one device. One process runs all cases."""

import pytest

from tests.daily import daily
from tests.kernels.mesh_worker import CASES, DTYPES, MODELS
from tests.simulated import results_on_devices
from tests.tolerances import TOLERANCE

TEST = "test_attention_on_a_mesh_equals_attention_on_one_device"
DAILY = ("splash, memory, documents, window", "ring, memory, documents, window", "llama by ring")
DAILY += ("cudnn, one key-value head", "cudnn, biases, documents", "a learned sink by ring")

pytestmark = pytest.mark.xdist_group("attention_on_mesh")  # one program computes all results: run it in one worker


@pytest.fixture(scope="module")
def results(request) -> dict[str, dict]:
    names = [item.callspec.params["name"] for item in request.session.items if item.originalname == TEST]
    return results_on_devices(8, "-m", "tests.kernels.mesh_worker", *names)


@pytest.mark.parametrize("name", daily(DAILY, CASES | MODELS))
def test_attention_on_a_mesh_equals_attention_on_one_device(results, name):
    """Output and gradients. `ring` rotates the keys; the other kernels gather them."""
    actual = results[name]
    kernel, mesh, *_ = (CASES | MODELS)[name]
    assert actual["error"] < TOLERANCE[DTYPES[kernel]]
    if name in CASES and kernel.startswith("ring"):
        assert actual["passes"] > 0 and actual["gathers"] == 0
    if name in CASES and not kernel.startswith("ring") and "context" in mesh:
        assert actual["gathers"] > 0
