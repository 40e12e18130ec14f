"""Matrices of skipless models that disappear into others: those of queries, keys and values, and W_O."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from tests.surgery.comparing import assert_exact, assert_refused
from tests.tiny_runs import tiny_model
from xfresearch import surgery
from xfresearch.surgery.network import take_apart

BLOCK = "model__blocks__main__"
BIASES = {BLOCK + "feed_forward__moe__bias": "('router','experts')"}
NORMLESS = {"layout": "no_skip", "norms__attention_in__kind": "none", "norms__feed_forward_in__kind": "none"}
NO_BIAS = {"attention__bias": "()"}
NO_QUERY_BIAS = {"attention__bias": "('key','value','output')"}


def normless(name: str = "gpt2", model: dict | None = None, **options):
    """A model without skips and without norms in its blocks, whose matrices have inverses."""
    final = {"model__final_norm": "layer"} | (model or {})
    lm = tiny_model(name, **{BLOCK + key: value for key, value in (NORMLESS | NO_BIAS | options).items()}, **final)
    return with_inverses(lm)


def with_inverses(lm):
    """The model with matrices of attention that are near 2 I."""
    for stack in lm.params["blocks"].values():
        for matrix in ("query", "key", "value"):
            kernel = stack["attention"].get(matrix, {}).get("kernel")
            if kernel is not None and kernel[0].size == kernel.shape[1] ** 2:
                wide = kernel.reshape(len(kernel), kernel.shape[1], -1)
                stack["attention"][matrix]["kernel"] = (wide + 2 * jnp.eye(wide.shape[1])).reshape(kernel.shape)
    return lm


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("drop_query", {"attention__bias": "('key','value','output')"}),
        (
            "drop_query",
            {"attention__position": "rope", "attention__qk_norm": "rms", "attention__kv_heads": 1}
            | {"feed_forward__bias": False, "attention__value": "key"},
        ),
        ("drop_query", {"attention__output_gate": "elementwise", "attention__memory_slots": 6, "attention__clip": 1.0}),
        ("drop_key", {"attention__value": "key", "attention__bias": "('query',)", "feed_forward__bias": False}),
        ("drop_value", {"attention__bias": "('key','output')", "attention__sink": "learned"}),
        (
            "drop_value",
            {"attention__memory_slots": 6, "attention__memory_activation": "relu", "attention__query": "merged"},
        ),
        ("drop_output", {"attention__bias": "('value','output')", "feed_forward__bias": False}),
        ("drop_output", {"feed_forward__kind": "swiglu", "attention__kind": "slots", "attention__bias": "('output',)"}),
    ],
    ids=lambda value: ",".join(str(each) for each in value.values()) if isinstance(value, dict) else value,
)
def test_a_model_without_the_matrix_computes_the_same(name, options):
    if options.get("attention__query") == "merged":
        options = options | {"attention__rank": 4}
    model = assert_exact(normless(**options), name)
    assert getattr(model.blocks["main"].attention, name.removeprefix("drop_")) == "identity"


def test_parallel_sublayers_and_experts_read_and_write_the_same_basis():
    lm = tiny_model("moe", **BIASES | {BLOCK + "layout": "skipless_parallel", BLOCK + "norm": "none"})
    assert assert_exact(with_inverses(lm), "drop_query").blocks["main"].attention.query == "identity"


@pytest.mark.parametrize("name", ["query", "value"])
def test_one_layer_changes_the_layer_before_with_its_bias(name):
    slots = {
        "attention__memory_slots": 6,
        "attention__memory_activation": "relu",
        "feed_forward__bias": name == "query",
    }
    model = assert_exact(normless(attention__bias=f"('{name}',)", **slots), f"drop_{name}", layers=(1,))
    assert [getattr(block.attention, name) for block in model.blocks.values()] == ["learned", "identity"]
    assert model.tie_embeddings


WITH_SKIP = "x Q for this layer alone: x is also added to the output .skip., so all layers would need the same Q"


@pytest.mark.parametrize(
    ("name", "options", "term"),
    [
        ("drop_query", {"layout": "pre_norm"}, WITH_SKIP),
        ("drop_value", {"layout": "parallel_two_norms"}, WITH_SKIP),
        ("drop_query", {"layout": "skipless"}, "W_O and W_down both write the next x, and W_1 reads what W_O writes"),
        (
            "drop_key",
            {"norms__attention_in__kind": "rms"},
            "norm.x Q. is not norm.x. Q, and norms.attention_in is 'rms'",
        ),
        ("drop_key", {"attention__kv_heads": 2}, "W_K is 32 x 16, not square: it has no inverse"),
        ("drop_value", {"attention__value": "identity_plus"}, "value='identity_plus' is no matrix W_V"),
        ("drop_value", {"attention__query": "identity"}, "query='identity' reads x itself and has no matrix for Q.-1"),
        ("drop_query", {"attention__kind": "differential"}, "a mixer of kind 'differential' cannot do without W_Q"),
        ("drop_query", {"model": {"model__position": "sinusoidal"}}, "there is no table of the sinusoids"),
        (
            "drop_query",
            {"model": {"model__embedding_norm": "rms"}},
            "norm.x. Q is not a norm of x Q, and embedding_norm",
        ),
        (
            "drop_query",
            {"attention__bias": "('query',)", "attention__output_gate": "head"},
            "the bias of the query has no place: gate of 'softmax' has no bias",
        ),
        (
            "drop_query",
            {"attention__bias": "('query',)"},
            "x Q . b shifts the embedding by the bias of the query, so that its gradient is no longer that of x",
        ),
        (
            "drop_output",
            {"norms__feed_forward_in__kind": "rms"},
            r"W_1 reads norm\(o W_O\): the norm divides by a length",
        ),
        ("drop_output", {"layout": "pre_norm"}, r"\(x \+ o W_O\) W_1: the residual x is added between"),
        ("drop_output", {"attention__head_size": 5}, r"o has 4 \* 5 numbers, and the model has 32"),
        ("drop_output", {"attention__kind": "differential"}, "kind 'differential' always has W_O"),
    ],
)
def test_a_refusal_names_the_term(name, options, term):
    options = dict(options)
    if options.get("attention__kind") == "differential":
        options |= {"attention__heads": 2}
        lm = tiny_model("variants", **{BLOCK + key: value for key, value in (NORMLESS | options).items()})
    else:
        lm = normless(**options)
    assert_refused(lm, name, f"layer 0.*{term}")


def test_a_layer_before_that_adds_x_is_refused():
    lm = normless(attention__bias="('query',)")
    skip = tiny_model("gpt2")
    network = take_apart(lm.config, lm.params)
    other = take_apart(skip.config, skip.params)
    mixed = replace(
        network,
        layers=(other.layers[0], network.layers[1]),
        params=lambda number: (other, network)[number].params(number),
    )
    with pytest.raises(
        surgery.Refused, match="layer 0, layout='pre_norm', writes x of layer 1: x Q for this layer alone"
    ):
        surgery.CONVERSIONS["drop_query"](mixed, (1,))


def test_a_matrix_without_an_inverse_is_refused():
    lm = normless()
    kernel = lm.params["blocks"]["main"]["attention"]["query"]["kernel"]
    lm.params["blocks"]["main"]["attention"]["query"]["kernel"] = kernel.at[1, :, 0, 1].set(kernel[1, :, 0, 0])
    with pytest.raises(surgery.Refused, match="layer 1, W_Q has condition number .* it has no exact inverse"):
        surgery.drop_query(lm)


def test_the_certificate_has_the_condition_numbers():
    _, certificate = surgery.drop_query(normless())
    assert certificate.exact and {*certificate.figures} == {f"condition number of layer {i}, W_Q" for i in (0, 1)}
