"""A feed-forward layer as a mixture of equal experts."""

import pytest

from tests.surgery.comparing import apart, assert_exact
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.surgery.certificate import BOUND

FEED_FORWARD = "model__blocks__main__feed_forward__"


def upcyclable(**options):
    return tiny_model("gpt2", **{FEED_FORWARD + key: value for key, value in options.items()})


@pytest.mark.parametrize(
    ("feed_forward", "options"),
    [
        ({}, {}),
        ({"bias": False}, {}),
        ({"kind": "swiglu", "gated_hidden": "matched"}, {"experts": 3, "top_k": 3, "seed": 4}),
        ({"kind": "softmax"}, {"experts": 4}),
    ],
)
def test_equal_experts_compute_the_same(feed_forward, options):
    lm = upcyclable(**feed_forward)
    actual = assert_exact(lm, "upcycle", **options).blocks["main"].feed_forward
    assert actual.kind == "moe" and actual.hidden == lm.config.blocks["main"].feed_forward.hidden
    assert actual.moe.experts == options.get("experts", 8) and actual.moe.renormalise
    assert actual.moe.bias == (("experts",) if feed_forward.get("bias", True) else ())


def test_some_layers_only_and_without_a_residual_stream_between():
    model = assert_exact(upcyclable(), "upcycle", layers=(1,))
    assert [block.feed_forward.kind for block in model.blocks.values()] == ["gelu_tanh", "moe"]
    lm = tiny_model("gpt2", model__blocks__main__layout="parallel")
    assert_exact(lm, "upcycle")


def test_noise_is_an_approximation():
    _, near, _ = apart(upcyclable(), "upcycle", noise=1e-6)
    _, far, _ = apart(upcyclable(), "upcycle", noise=0.1)
    assert BOUND < near < 1e-3 < far
    conversion = surgery.CONVERSIONS["upcycle"]
    assert conversion.approximates({"noise": 0.1}) and not conversion.approximates({})


def test_the_certificate_says_that_it_is_an_approximation():
    lm, certificate = surgery.upcycle(upcyclable(), noise=0.1, experts=2)
    assert certificate.approximate and not certificate.exact and certificate.relative > 1e-3
    assert lm.config.blocks["main"].feed_forward.moe.experts == 2


@pytest.mark.parametrize(
    ("lm", "options", "term"),
    [
        (lambda: upcyclable(kind="solu"), {}, "layer 0: 'solu' has a norm before W_down"),
        (lambda: tiny_model("moe"), {}, "layer 0: the feed-forward layer is a mixture of experts already"),
        (lambda: tiny_model("all_attention"), {}, "layer 0: layout='all_attention' has no feed-forward layer"),
        (upcyclable, {"top_k": 1}, "top_k=1 is not 2 to experts=8"),
        (upcyclable, {"noise": -1.0}, "noise=-1.0 is below 0"),
        (upcyclable, {"seed": -1}, "seed=-1 is below 0"),
    ],
)
def test_a_refusal_names_the_term(lm, options, term):
    with pytest.raises(surgery.Refused, match=f"^upcycle: {term}"):
        surgery.upcycle(lm(), **options)
