"""Gains and biases of norms in the linear maps that read them."""

import pytest

from tests.surgery.comparing import assert_exact
from tests.surgery.test_merge_query_key import changed
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.models import transformer
from xfresearch.trees import by_path

NO_POSITION = {"model__position": "none"}


@pytest.mark.parametrize("name", ["gpt2", "llama", "moe", "gptj", "merged_query", "palm"])
def test_the_model_without_gains_computes_the_same(name):
    model = assert_exact(tiny_model(name), "fold_norm")
    paths = by_path(transformer.abstract(model))
    assert not [path for path in paths if "norm_in" in path or path.startswith("final_norm")]


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__embedding_norm": "rms", "model__position": "none", "model__embedding_scale": "learned"},
        {"model__blocks__main__norm": "dyt", "model__final_norm": "none"},
        {"model__blocks__main__norm": "derf", "model__final_norm": "derf"},
        {"model__blocks__main__attention__query": "merged", "model__blocks__main__attention__bias": "()"},
        {"model__blocks__main__attention__value": "key", "model__blocks__main__attention__bias": "('key',)"},
    ],
    ids=lambda overrides: ",".join(str(value) for value in overrides.values()),
)
def test_variants(overrides):
    assert_exact(tiny_model("gpt2", **overrides), "fold_norm")


def test_some_layers_only():
    model = assert_exact(tiny_model("llama"), "fold_norm", layers=(0,))
    assert model.final_norm == "rms" and len(model.blocks) == 2


@pytest.mark.parametrize(
    ("name", "overrides", "term"),
    [
        ("all_attention", {}, "norms.attention_post writes the residual stream"),
        ("moe", {"model__blocks__main__norm_bias": True}, "the norm's bias has no place: .* of 'moe' has no bias"),
        ("gpt2", {"model__embedding_norm": "layer"}, "embedding_norm reads the token's embedding plus position='learned'"),
        ("gpt2", NO_POSITION | {"model__embedding_norm": "dyt"}, "embedding_norm of kind 'dyt': tables are made"),
        ("gpt2", NO_POSITION | {"model__embedding_norm": "derf"}, "embedding_norm of kind 'derf': tables are made"),
    ],
)
def test_a_refusal_names_the_term(name, overrides, term):
    with pytest.raises(surgery.Refused, match=f"^fold_norm: .*{term}"):
        surgery.fold_norm(tiny_model(name, **overrides))


def test_an_identity_has_no_matrix():
    with pytest.raises(surgery.Refused, match="layer 0, attention: value='identity' has no matrix"):
        surgery.fold_norm(changed(value="identity", bias="()"))


def test_a_gain_with_an_offset():
    overrides = {"model__blocks__main__norm_offset": 1.0, "model__blocks__main__norm": "rms", "model__final_norm": "rms"}
    assert_exact(tiny_model("llama", **overrides), "fold_norm")
