"""Mean removal in everything that writes the residual stream."""

import pytest

from tests.surgery.comparing import assert_exact, assert_refused, changed
from tests.tiny_runs import tiny_model
from xfresearch import surgery

BLOCK = "model__blocks__main__"
BIASES = {BLOCK + "feed_forward__moe__bias": "('router','experts')"}
MEMORY = {BLOCK + "attention__memory_slots": 6, BLOCK + "attention__memory_activation": "relu"}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt2", {"model__embedding_scale": "learned"}),
        ("gptj", {}),
        ("gpt2", MEMORY),
        ("gpt2", {BLOCK + "attention__kind": "differential"}),
        ("moe", BIASES | {BLOCK + "norm": "layer", "model__final_norm": "layer", "model__embedding_scale": "sqrt_width"}),
        ("palm", {BLOCK + "layout": "parallel_two_norms", BLOCK + "norm": "layer", "model__final_norm": "layer"}),
        ("gpt2", {BLOCK + "layout": "fused_output", BLOCK + "attention__bias": "()"}),
        ("gpt2", {BLOCK + "layout": "no_residual_between"}),
        ("gpt2", {BLOCK + "layout": "no_skip"}),
        ("gpt2", {BLOCK + "layout": "skipless"}),
    ],
    ids=lambda value: ",".join(map(str, value.values())) or "base" if isinstance(value, dict) else value,
)
def test_the_model_with_rms_norms_computes_the_same(name, overrides):
    model = assert_exact(tiny_model(name, **overrides), "centre")
    assert model.final_norm == "rms" and {block.norm for block in model.blocks.values()} == {"rms"}


def test_projections_without_a_gain_are_no_norms():
    project = {BLOCK + "norm": "project", BLOCK + "norm_gain": False, BLOCK + "norm_bias": False}
    model = assert_exact(tiny_model("gpt2", model__final_norm="project", **project), "centre")
    assert model.final_norm == "none" and model.blocks["main"].norm == "none"


def test_a_projection_with_a_gain_stays():
    project = {BLOCK + "norms__attention_in__kind": "project", BLOCK + "norms__feed_forward_in__epsilon": 0.1}
    block = assert_exact(tiny_model("gpt2", **project), "centre").blocks["main"]
    assert block.norm_at("attention_in").kind == "project" and block.norm_at("feed_forward_in").kind == "rms"
    with pytest.raises(surgery.Refused, match="^centre: all norms are of kind 'project' with a gain or a bias"):
        surgery.centre(tiny_model("gpt2", model__final_norm="project", **{BLOCK + "norm": "project"}))


@pytest.mark.parametrize(
    ("overrides", "term"),
    [
        ({BLOCK + "layout": "no_norm_between"}, "layer 0: feed_forward reads the residual stream without a norm"),
        ({BLOCK + "layout": "post_norm", "model__final_norm": "none"}, "the final norm of kind 'none' reads the mean"),
        ({BLOCK + "layout": "resi_dual"}, "layer 0: the output of norms.attention_post, .*is the residual stream"),
        ({BLOCK + "layout": "peri_norm"}, "layer 0: the output of norms.attention_out, .*is added to the residual"),
        ({"model__final_norm": "rms"}, "the final norm of kind 'rms' reads the mean"),
        ({BLOCK + "norms__feed_forward_in__kind": "dyt"}, "norms.feed_forward_in of kind 'dyt' reads the mean"),
        ({BLOCK + "norms__feed_forward_in__kind": "derf"}, "norms.feed_forward_in of kind 'derf' reads the mean"),
        ({"model__final_norm": "derf"}, "the final norm of kind 'derf' reads the mean"),
        ({"model__embedding_norm": "layer"}, "the embedding's norm of kind 'layer' writes the stream"),
        ({"model__position": "sinusoidal"}, "position='sinusoidal' is a fixed table"),
        ({BLOCK + "attention__kind": "lambda"}, "layer 0: attention of kind 'lambda' writes its heads"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_refusal_names_the_term(overrides, term):
    if BLOCK + "attention__kind" in overrides:
        overrides |= {BLOCK + "attention__lambdas__window": 4}
    assert_refused(tiny_model("gpt2", **overrides), "centre", f".*{term}")


def test_heads_in_the_stream_are_refused():
    with pytest.raises(surgery.Refused, match="attention of kind 'softmax' with output='identity' writes its heads"):
        surgery.centre(changed(output="identity", bias="()"))
    with pytest.raises(surgery.Refused, match="^centre: all layers add to one residual stream"):
        surgery.centre(changed(), layers=(0,))


def test_the_certificate_measures_the_result_after_fold_norm():
    """GPT-2 with RMSNorm without gains, in D - 1 dimensions."""
    before = changed()
    lm, certificate = surgery.convert(before, surgery.chain("fold_norm,centre", options={"width": "less_one"}))
    assert certificate.exact and certificate.gradient < 1e-10
    assert lm.config.final_norm == "rms" and lm.config.width == before.config.width - 1


WITHOUT_GAINS = {BLOCK + "norm_gain": False, BLOCK + "norm_bias": False}


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__embedding_scale": "sqrt_width", BLOCK + "norm_epsilon": 0.3} | MEMORY,
        {BLOCK + "layout": "parallel", BLOCK + "norm": "project", BLOCK + "feed_forward__hidden_factor": 3.0},
        {BLOCK + "layout": "fused_output", BLOCK + "attention__bias": "()", "model__final_norm": "project"},
        {
            "model__position": "none",
            "model__head_scale": "inverse_sqrt_width",
            BLOCK + "norms__feed_forward_in__kind": "project",
        },
    ],
    ids=lambda overrides: ",".join(map(str, overrides.values())),
)
def test_a_stream_without_a_mean_has_one_dimension_less(overrides):
    lm = tiny_model("gpt2", **WITHOUT_GAINS | overrides)
    assert assert_exact(lm, "centre", width="less_one").width == lm.config.width - 1


@pytest.mark.parametrize(
    ("overrides", "term"),
    [
        ({BLOCK + "norm_gain": True}, "the final norm has a gain or a bias of size D .fold_norm first"),
        ({BLOCK + "norms__feed_forward_in__gain": True}, "layer 0: norms.feed_forward_in has a gain or a bias of size D"),
        ({BLOCK + "layout": "no_residual_between"}, "layer 0: the output of attention is no part of the stream"),
        ({BLOCK + "attention__value": "identity_whole", BLOCK + "attention__bias": "()"}, "value='identity_whole' reads"),
        ({BLOCK + "attention__kind": "differential"}, "layer 0: the final norm shares its epsilon"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_needs_all_dimensions_is_refused(overrides, term):
    lm = tiny_model("gpt2", **WITHOUT_GAINS | overrides)
    assert_refused(lm, "centre", f"width='less_one': .*{term}", width="less_one")
