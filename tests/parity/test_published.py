"""The parameters of tests/interop/published.py are those that `transformers` counts, without memory for them."""

import pytest

from tests.interop.published import PUBLISHED
from tests.parity.weights import MISSING

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("config, count", [pytest.param(*case, id=name) for name, case in PUBLISHED.items()])
def test_transformers_counts_the_same(config, count):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert sum(parameter.numel() for parameter in model.parameters()) == count
