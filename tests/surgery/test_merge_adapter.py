"""merge_adapter: adapters go into the matrices beside them, in every stack; other conversions ask for it first."""

import jax
import numpy as np
import pytest

from tests.surgery.comparing import assert_exact, assert_refused
from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.surgery.layerwise import Runner
from xfresearch.surgery.network import take_apart

LORA = {"model__adapter__kind": "lora", "model__adapter__scaling": "rslora"}


@pytest.mark.parametrize("name", ["gpt2", "all_attention", "t5", "mixtral_8x7b"])
def test_the_merged_model_has_no_adapter_and_equal_logits(name):
    assert assert_exact(tiny_model(name, **LORA), "merge_adapter").adapter.kind == "none"


@pytest.mark.parametrize("name", ["all_attention", "t5"])
def test_the_cache_of_decoding_has_the_sums(name):
    """Slots in the softmax, and the keys and values of a source, are in the cache before the first token."""
    random = np.random.default_rng(0)
    tokens_BL, source_BS = random.integers(257, size=(2, 2, 8))
    lm = tiny_model(name, **LORA)
    with jax.enable_x64(True):
        runner = Runner(take_apart(lm.config, lm.params), "float64")
        made = runner.run(tokens_BL, cached=3, source_BS=source_BS if lm.config.encoder else None)
    assert relative_error(made.cached_BCV, made.logits_BLV[:, -3:]) < TOLERANCE["float64"]


def test_what_cannot_be_merged_is_refused():
    assert_refused(tiny_model("gpt2"), "merge_adapter", "the model has no adapter")
    for part in ({"layers": (0,)}, {"stack": "encoder"}):
        assert_refused(tiny_model("t5", **LORA), "merge_adapter", "all layers of all stacks have adapters", **part)


def test_other_conversions_say_how_to_merge_first():
    lm = tiny_model("gpt2", **LORA)
    assert_refused(lm, "fold_norm", "the model has an adapter: convert merge_adapter,fold_norm merges it first")
