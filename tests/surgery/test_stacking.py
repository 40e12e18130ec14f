"""Layers that compute the identity, added and removed."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.surgery.comparing import assert_exact, assert_refused, changed
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.runtime.trees import by_path
from xfresearch.surgery.network import assemble, take_apart

BLOCK = "model__blocks__main__"
BIASES = {BLOCK + "feed_forward__moe__bias": "('router','experts')"}


def stacked(lm, layers=None, **options):
    """The network with identity layers, and the one before."""
    before = take_apart(lm.config, lm.params)
    return before, surgery.CONVERSIONS["stack"](before, layers, **options)


@pytest.mark.parametrize(
    ("name", "overrides", "options"),
    [
        ("gpt2", {}, {"copies": 2}),
        ("moe", BIASES | {BLOCK + "feed_forward__moe__shared": 1}, {"layers": (1,)}),
        ("gpt2", {BLOCK + "layout": "peri_norm"}, {"layers": (0,)}),
        ("gpt2", {BLOCK + "layout": "peri_norm", BLOCK + "norm": "derf"}, {"layers": (0,)}),
        ("gptj", {}, {}),
        ("gpt2", {BLOCK + "layout": "no_norm_between", BLOCK + "attention__kind": "differential"}, {"layers": (1,)}),
        ("gpt2", {BLOCK + "layout": "fused_output", BLOCK + "attention__bias": "()"}, {"layers": (1,)}),
    ],
    ids=lambda value: ",".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_a_deeper_model_computes_the_same(name, overrides, options):
    lm = tiny_model(name, **overrides)
    model = assert_exact(lm, "stack", **options)
    assert model.depth > lm.config.depth


def test_unstack_restores_every_bit():
    for lm in (tiny_model("gpt2"), tiny_model("moe"), tiny_model("gpt2", **{BLOCK + "layout": "peri_norm"})):
        before, deeper = stacked(lm, copies=2)
        after = surgery.CONVERSIONS["unstack"](deeper)
        (old_model, old), (new_model, new) = (assemble(each, "float64") for each in (before, after))
        assert new_model == old_model
        jax.tree.map(np.testing.assert_array_equal, new, old)


def test_the_public_functions_restore_every_bit():
    lm = changed()
    deeper, certificate = surgery.stack(lm)
    assert certificate.exact and deeper.config.depth == 2 * lm.config.depth
    restored, certificate = surgery.unstack(deeper)
    assert certificate.exact and restored.config == lm.config
    for path, leaf in by_path(lm.params).items():
        np.testing.assert_array_equal(by_path(restored.params)[path], leaf)


@pytest.mark.parametrize(
    ("overrides", "term"),
    [
        ({BLOCK + "layout": "post_norm", "model__final_norm": "none"}, "norms.attention_post reads the skip too, and norm"),
        ({BLOCK + "layout": "resi_dual"}, "norms.attention_post reads the skip too"),
        ({BLOCK + "layout": "deep_norm", "model__final_norm": "none"}, r"the factor \(2 depth\)\^\(1/4\) of the skip"),
        ({BLOCK + "layout": "skipless"}, "layout='skipless' has no skip around attention: x is not added"),
        ({BLOCK + "layout": "skipless_parallel"}, "layout='skipless_parallel' has no skip around attention"),
        ({BLOCK + "layout": "no_skip"}, "layout='no_skip' has no skip around feed_forward: x is not added"),
        ({BLOCK + "attention__output": "identity", BLOCK + "attention__bias": "()"}, "attention .* writes its heads"),
        ({BLOCK + "layout": "peri_norm", BLOCK + "norm_epsilon": 0.0}, "norms.attention_out without epsilon divides 0 by 0"),
    ],
    ids=lambda value: ",".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_refusal_names_the_term(overrides, term):
    assert_refused(tiny_model("gpt2", **overrides), "stack", f"layer 0: .*{term}")


def test_the_number_of_a_layer_may_matter():
    lm = changed(kind="differential")
    with pytest.raises(surgery.Refused, match=r"^stack: layer 1: lambda_0 .* depends on the layer's number l"):
        surgery.stack(lm, layers=(0,))
    with pytest.raises(surgery.Refused, match="^stack: copies=0 is below 1"):
        surgery.stack(lm, copies=0)


def test_a_layer_whose_values_others_read_is_refused():
    lm = changed(kind="value_residual")
    before = take_apart(lm.config, lm.params)
    wide = replace(before, params=lambda number: {p: 0 * v if number == 0 else v for p, v in before.params(number).items()})
    with pytest.raises(surgery.Refused, match="^unstack: layer 0: blocks.1.attention reads the first_value of this layer"):
        surgery.CONVERSIONS["unstack"](wide, (0,))


def test_only_identities_are_removed():
    lm = changed()
    with pytest.raises(surgery.Refused, match="^unstack: layer 0: attention/output/bias is not 0"):
        surgery.unstack(lm)
    _, deeper = stacked(lm)
    with pytest.raises(surgery.Refused, match="^unstack: layer 2: attention/output/bias is not 0"):
        surgery.CONVERSIONS["unstack"](deeper, (1, 2))
    last = surgery.CONVERSIONS["unstack"](deeper, (3,))
    assert len(last.layers) == 3
