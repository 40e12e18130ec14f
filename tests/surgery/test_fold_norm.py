"""Gains and biases of norms in the linear maps that read them."""

import pytest

from tests.surgery.comparing import assert_exact, assert_refused, changed
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.models import transformer
from xfresearch.runtime.trees import by_path
from xfresearch.surgery import CONVERSIONS
from xfresearch.surgery.network import take_apart

NO_POSITION = {"model__position": "none"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "moe", "gptj", "merged_query", "palm"])
def test_the_model_without_gains_computes_the_same(name):
    model = assert_exact(tiny_model(name), "fold_norm")
    paths = by_path(transformer.abstract(model))
    assert not [path for path in paths if "norm_in" in path or path.startswith("final_norm")]


@pytest.mark.parametrize(
    "overrides",
    [
        {
            "model__embedding_norm": "rms",
            "model__position": "none",
            "model__embedding_scale": "learned",
            "model__head_scale": "inverse_sqrt_width",
        },
        {"model__blocks__main__norm": "dyt", "model__final_norm": "none"},
        {"model__blocks__main__norm": "derf", "model__final_norm": "derf"},
        {"model__blocks__main__attention__query": "merged", "model__blocks__main__attention__bias": "()"},
        {"model__blocks__main__attention__value": "key", "model__blocks__main__attention__bias": "('key',)"},
    ],
    ids=lambda overrides: ",".join(str(value) for value in overrides.values()),
)
def test_variants(overrides):
    assert_exact(tiny_model("gpt2", **overrides), "fold_norm")


@pytest.mark.parametrize("moe", [{"shared": 1}, {"expert": "gelu", "bias": "('experts',)"}], ids=("new", "one exists"))
def test_experts_and_their_router_take_the_bias(moe):
    """The router, each expert and the shared one get b W, and the last maps of experts a bias of 0."""
    overrides = {f"model__blocks__main__feed_forward__moe__{key}": value for key, value in moe.items()}
    lm = tiny_model("moe", model__blocks__main__norm_bias=True, **overrides)
    assert assert_exact(lm, "fold_norm").blocks["main"].feed_forward.moe.bias == ("router", "experts")


def test_some_layers_only():
    model = assert_exact(tiny_model("llama"), "fold_norm", layers=(0,))
    assert model.final_norm == "rms" and len(model.blocks) == 2


@pytest.mark.parametrize(
    ("name", "overrides", "term"),
    [
        ("all_attention", {}, "norms.attention_post writes the residual stream"),
        (
            "gpt2",
            {"model__blocks__main__attention__output_gate": "head"},
            "the norm's bias has no place: gate of 'softmax' has no bias",
        ),
        ("gpt2", {"model__embedding_norm": "layer"}, "embedding_norm reads the token's embedding plus position='learned'"),
        ("gpt2", NO_POSITION | {"model__embedding_norm": "dyt"}, "embedding_norm of kind 'dyt': tables are made"),
        ("gpt2", NO_POSITION | {"model__embedding_norm": "derf"}, "embedding_norm of kind 'derf': tables are made"),
    ],
)
def test_a_refusal_names_the_term(name, overrides, term):
    assert_refused(tiny_model(name, **overrides), "fold_norm", f".*{term}")


@pytest.mark.parametrize(
    ("norm", "options", "term"),
    [
        ("rms", {"value": "key"}, "value='key' is g h . b itself"),
        ("rms", {"memory_slots": 3}, "keys that are h, and those of slots are trained"),
        ("rms", {"position": "relative_key"}, "keys that are h, and relative keys are trained"),
        ("layer", {"softcap": 2.0}, "terms that the softmax over the context cancels, and softcap=2.0 does not"),
        ("layer", {"sink": "off_by_one"}, "the softmax over the context cancels, and slots or a sink do not"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_term_that_a_merged_matrix_cannot_take(norm, options, term):
    """At full rank the key is the normed x. Factors of a rank have a key of their own."""
    lm = tiny_model("gpt2", **with_norm(norm, query="merged", bias="()", **options))
    assert_refused(lm, "fold_norm", f"layer 0, attention: .*{term}")
    lm = tiny_model("gpt2", **with_norm(norm, query="merged", rank=4, bias="()", **options))
    assert CONVERSIONS["fold_norm"](take_apart(lm.config, lm.params)).resolved


def with_norm(norm: str, **attention) -> dict:
    """Overrides for norms of one kind, which have a bias if they are LayerNorms, and for options of attention."""
    norms = {"model__blocks__main__norm": norm, "model__final_norm": norm}
    norms |= {"model__blocks__main__norm_bias": norm == "layer"}
    return norms | {f"model__blocks__main__attention__{key}": value for key, value in attention.items()}


@pytest.mark.parametrize("options", [{"sink": "learned"}, {"softcap": 2.0}, {"rank": 4, "memory_slots": 3}])
def test_a_merged_matrix_takes_the_gain_on_both_sides(options):
    norm = "layer" if "rank" in options else "rms"
    assert_exact(tiny_model("gpt2", **with_norm(norm, query="merged", bias="()", **options)), "fold_norm")


def test_the_norm_of_the_embedding_alone():
    overrides = {"model__blocks__main__layout": "post_norm", "model__final_norm": "none", "model__embedding_norm": "layer"}
    assert assert_exact(tiny_model("gpt2", **NO_POSITION | overrides), "fold_norm").embedding_norm == "none"


def test_an_identity_has_no_matrix():
    with pytest.raises(surgery.Refused, match="layer 0, attention: value='identity' has no matrix"):
        surgery.fold_norm(changed(value="identity", bias="()"))


def test_a_gain_with_an_offset():
    overrides = {"model__blocks__main__norm_offset": 1.0, "model__blocks__main__norm": "rms", "model__final_norm": "rms"}
    assert_exact(tiny_model("llama", **overrides), "fold_norm")
