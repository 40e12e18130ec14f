"""The numbers of parameters and the windows of published models in tests/interop equal those of `transformers`.

Parameters are counted on the meta device, which allocates no memory.
"""

import pytest

from tests.interop import published_2025, published_masked, published_seq2seq
from tests.interop.test_reading import WINDOWS, changed
from tests.parity.weights import MISSING

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

from tests.parity.hf_torch import auto_class  # noqa: E402

pytestmark = pytest.mark.parity
PUBLISHED = published_2025.PUBLISHED | published_seq2seq.PUBLISHED | published_masked.PUBLISHED


@pytest.mark.parametrize("config, count", [pytest.param(*case, id=name) for name, case in PUBLISHED.items()])
def test_transformers_counts_the_same(config, count):
    """It ties the head of every T5 that it makes of a config. The files of v1.1 have another one."""
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = auto_class(made).from_config(made)
    untied = made.model_type == "t5" and not made.scale_decoder_outputs
    heads = made.vocab_size * made.d_model if untied else 0
    assert sum(parameter.numel() for parameter in model.parameters()) + heads == count


@pytest.mark.parametrize("config, changes, expected", WINDOWS)
def test_transformers_reads_the_same_windows(config, changes, expected):
    theirs = transformers.AutoConfig.for_model(**changed(config, changes))
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = theirs.sliding_window or 0
    assert [window if kind == "sliding_attention" else 0 for kind in types] == expected
