"""The numbers of parameters and the windows of published models in tests/interop equal those of `transformers`.

Parameters are counted on the meta device, which allocates no memory.
"""

import pytest

from tests.interop.published_2025 import PUBLISHED
from tests.interop.test_reading import WINDOWS, changed
from tests.parity.weights import MISSING

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("config, count", [pytest.param(*case, id=name) for name, case in PUBLISHED.items()])
def test_transformers_counts_the_same(config, count):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("config, changes, expected", WINDOWS)
def test_transformers_reads_the_same_windows(config, changes, expected):
    theirs = transformers.AutoConfig.for_model(**changed(config, changes))
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = theirs.sliding_window or 0
    assert [window if kind == "sliding_attention" else 0 for kind in types] == expected
