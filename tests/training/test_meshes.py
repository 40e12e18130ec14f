"""One update of a named config on a mesh of 8 simulated devices equals that on one device: loss, gradients, new
parameters, figures of the panel.

By default one config; tests/contracts/test_sharded.py has one with all axes but `context`, which is in
tests/kernels/test_attention_on_mesh.py. Under `long` every config on every mesh that supports it.
"""

import pytest

from tests.contracts.variants import NAMED
from tests.daily import daily
from tests.simulated import results_on_devices
from tests.tolerances import TOLERANCE
from tests.training.mesh_worker import DEVICES, MESHES

CASES = [f"{name}@{mesh}" for name in NAMED for mesh in MESHES]
DAILY = ["mixtral_8x7b@expert"]
MORE = [("moe@expert-all", True), ("llama@fsdp", False)]
TEST = "test_an_update_equals_that_of_one_device"


pytestmark = pytest.mark.xdist_group("meshes")  # one program computes all results: run it in one worker


@pytest.fixture(scope="module")
def results(request) -> dict[str, dict]:
    wanted = [item.callspec.params["case"] for item in request.session.items if item.originalname == TEST]
    return results_on_devices(DEVICES, "-m", "tests.training.mesh_worker", *sorted({*wanted, *DAILY}))


@pytest.mark.parametrize("case", daily(DAILY, CASES))
def test_an_update_equals_that_of_one_device(results, case):
    result = results[case]
    if "refused" in result:
        assert case not in DAILY
        pytest.skip(result["refused"])
    for name in ("loss", "gradients", "gradient norm", "parameters"):
        assert result[name] < TOLERANCE["float64"], (name, result[name])
    assert result["panel"] < TOLERANCE["float32"], result["panel"]  # its figures are float32


@pytest.mark.parametrize("case", [*DAILY, pytest.param("llama@fsdp", marks=pytest.mark.long)])
def test_fsdp_gathers_parameters_and_scatters_gradients(results, case):
    assert {"all-gather", "reduce-scatter"} <= set(results[case]["collectives"])


@pytest.mark.parametrize("case, sent", [(*DAILY, True), *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)])
def test_the_expert_axis_sends_tokens_to_their_experts(results, case, sent):
    assert ("all-to-all" in results[case]["collectives"]) == sent
