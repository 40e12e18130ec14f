"""W_O W_1 as one matrix, and the terms that stand between the two elsewhere."""

import re

import pytest

from tests.surgery.comparing import assert_exact
from tests.tiny_runs import tiny_model
from xfresearch import surgery

BLOCK = "model__blocks__main__"


def in_layout(layout: str, **options):
    """GPT-2 with another layout, and other options of the block."""
    final = {"model__final_norm": "none"} if layout in ("post_norm", "deep_norm", "all_attention") else {}
    changes = {BLOCK + key: value for key, value in ({"layout": layout} | options).items()}
    return tiny_model("gpt2", **changes, **final)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention__head_size": 5, "attention__kv_heads": 2, "attention__output_gate": "head"},
        {"attention__value": "identity_whole", "attention__bias": "()", "feed_forward__kind": "swiglu"},
        {"attention__kind": "differential", "attention__heads": 2, "feed_forward__kind": "solu"},
        {"attention__kind": "slots", "attention__bias": "('output',)", "feed_forward__bias": False},
    ],
    ids=lambda options: ",".join(str(value) for value in options.values()) or "base",
)
def test_the_product_computes_the_same(options):
    model = assert_exact(in_layout("no_residual_between", **options), "fuse_output")
    assert model.blocks["main"].layout == "fused_output"


def test_the_router_reads_the_heads_too():
    lm = tiny_model("moe", **{BLOCK + "layout": "no_residual_between", BLOCK + "feed_forward__moe__shared": 1})
    assert assert_exact(lm, "fuse_output").blocks["main"].layout == "fused_output"


NO_NORM = {"norms__feed_forward_in__kind": "none"}


@pytest.mark.parametrize(
    ("layout", "options", "term"),
    [
        (
            "pre_norm",
            {},
            "W_1 reads norm(x + o W_O): x is added after W_O, and the norm divides by a length that depends on W_O",
        ),
        ("pre_norm", NO_NORM, "(x + o W_O) W_1: the residual x is added between"),
        ("pre_norm", {"norm": "dyt"}, "W_1 reads norm(x + o W_O): x is added after W_O, and tanh is not linear in W_O"),
        ("no_skip", {"norm": "derf"}, "W_1 reads norm(o W_O): erf is not linear in W_O"),
        ("no_norm_between", {}, "(x + o W_O) W_1: the residual x is added between"),
        ("post_norm", {}, "W_1 reads norm(x + o W_O): x is added after W_O"),
        ("deep_norm", {}, "W_1 reads norm(alpha x + o W_O): x is added after W_O"),
        ("peri_norm", {}, "W_1 reads norm(x + norm(o W_O)): x is added after W_O"),
        ("output_norm", {}, "W_1 reads x + norm(o W_O): x is added after W_O"),
        ("parallel", {}, "W_1 reads norm(x), not o W_O"),
        ("parallel_two_norms", {}, "W_1 reads norm(x), not o W_O"),
        ("parallel_two_norms", NO_NORM, "W_1 reads x, not o W_O"),
        ("no_skip", {}, "W_1 reads norm(o W_O): the norm divides by a length that depends on W_O"),
        (
            "no_skip",
            NO_NORM,
            "nothing stands between W_O and W_1, but layout='no_skip' keeps a place for W_O: drop_output",
        ),
        ("skipless", {}, "W_1 reads norm(a o W_O): the norm divides by a length that depends on W_O"),
        ("skipless", NO_NORM, "b o W_O + f(a o W_O W_1): the skip of the feed-forward layer reads W_O too"),
        ("skipless_parallel", {}, "W_1 reads norm(x), not o W_O"),
        ("attention_only", {}, "layout='attention_only': there is no W_1"),
        ("all_attention", {}, "layout='all_attention': there is no W_1"),
        ("fused_output", {"attention__bias": "()"}, "there is no W_O"),
        (
            "no_residual_between",
            {"attention__memory_slots": 6, "attention__memory_activation": "relu"},
            "W_1 reads o W_O + f(x k^T + b) v: the slots are added after W_O",
        ),
        ("no_residual_between", {"attention__kind": "lambda"}, "there is no W_O: a mixer of kind 'lambda' without it"),
    ],
)
def test_a_refusal_names_the_term(layout, options, term):
    with pytest.raises(surgery.Refused, match=f"^fuse_output: layer 0: {re.escape(term)}"):
        surgery.fuse_output(in_layout(layout, **options))


def test_experts_and_their_router_take_the_bias():
    lm = tiny_model("moe", **{BLOCK + "layout": "no_residual_between", BLOCK + "attention__bias": "('output',)"})
    assert assert_exact(lm, "fuse_output").blocks["main"].feed_forward.moe.bias == ("router", "experts")


def test_the_certificate_is_exact():
    lm, certificate = surgery.fuse_output(in_layout("no_residual_between"))
    assert certificate.exact and certificate.gradient < 1e-10
    assert lm.config.blocks["main"].attention.output == "identity"
