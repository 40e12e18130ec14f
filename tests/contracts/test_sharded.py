"""Contract 3: sharded equals unsharded, and scanned equals unrolled. One process computes all selected variants."""

import pytest

from tests.contracts.sharded_worker import TESTED
from tests.contracts.variants import marked
from tests.simulated import results_on_devices
from tests.tolerances import TOLERANCE

TEST = "test_sharded_equals_unsharded"

pytestmark = pytest.mark.xdist_group("sharded")  # one program computes all results: run it in one worker


@pytest.fixture(scope="module")
def errors(request) -> dict[str, float]:
    names = [item.callspec.params["name"] for item in request.session.items if item.originalname == TEST]
    return results_on_devices(8, "-m", "tests.contracts.sharded_worker", *names)


@pytest.mark.parametrize("name", marked([], TESTED))  # the default run has updates on meshes: training/test_meshes.py
def test_sharded_equals_unsharded(errors, name):
    assert errors[name] < TOLERANCE["float64"]
