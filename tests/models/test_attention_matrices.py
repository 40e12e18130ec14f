"""Attention without some of its matrices: what each form is equal to, weighs and costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import forward, in_float64, model, random_params, tokens_for
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.errors import UserError
from xfresearch.models import transformer
from xfresearch.models.closed_form import costs

D, H, K, L = 32, 4, 8, 8


def attention(**changes):
    return in_float64(model({f"blocks.main.attention.{name}": value for name, value in changes.items()}))


def kernels(params):
    return params["blocks"]["main"]["attention"]


def logits(config, params):
    return forward(config, params, tokens_for(config))[0]


def test_merged_is_the_pair_multiplied_out(x64):
    pair, merged, low = attention(), attention(query="merged"), attention(query="merged", rank=K)
    params = random_params(pair)
    expected = logits(pair, params)
    assert relative_error(logits(low, params), expected) < TOLERANCE["float64"]
    a = dict(kernels(params))
    product = jnp.einsum("ndhk,nehk->ndhe", a.pop("query")["kernel"], a.pop("key")["kernel"])
    params["blocks"]["main"]["attention"] = a | {"query": {"kernel": product}}
    assert jax.tree.structure(params) == jax.tree.structure(transformer.abstract(merged))
    assert relative_error(logits(merged, params), expected) < TOLERANCE["float64"]


@pytest.mark.parametrize("names", [("output", "key"), ("query", "key", "value")])
def test_each_projection_has_a_bias_or_has_none(names, x64):
    config = attention(bias=names)
    params = kernels(transformer.abstract(config))
    assert {name for name, matrix in params.items() if "bias" in matrix} == set(names)
    assert config == attention(bias=names[::-1]), "the order of the names does not matter"


@pytest.mark.parametrize("name, heads", [("query", H), ("key", H), ("value", H), ("output", H)])
def test_identity_is_a_learned_identity(name, heads, x64):
    """Split: head h reads (or writes) the h-th slice of the stream."""
    left_out, learned = attention(**{name: "identity"}), attention()
    params = random_params(left_out)
    eye = jnp.eye(D).reshape((D, H, K) if name != "output" else (H, K, D))
    full = jax.tree.map(lambda x: x, params)
    kernels(full)[name] = {"kernel": jnp.stack([eye] * 2)}
    assert relative_error(logits(left_out, params), logits(learned, full)) < TOLERANCE["float64"]


def test_identity_plus_is_a_learned_sum_and_weighs_two_numbers_more(x64):
    plus, learned = attention(value="identity_plus"), attention()
    params = random_params(plus)
    full = jax.tree.map(lambda x: x, params)
    part = kernels(full)["value"]
    a, b = (part[name][:, None, None, None] for name in ("identity_gain", "weight_gain"))
    kernels(full)["value"] = {"kernel": a * jnp.eye(D).reshape(D, H, K) + b * part["kernel"]}
    assert relative_error(logits(plus, params), logits(learned, full)) < TOLERANCE["float64"]
    assert costs(plus).parameters == costs(learned).parameters + 2 * 2
    with pytest.raises(UserError, match="value='identity_plus' is not allowed: it must be 'identity_plus' only where"):
        attention(value="identity_plus", kv_heads=2)


@pytest.mark.parametrize("name, size", [("query", D), ("key", D), ("value", K)])
def test_identity_whole_gives_every_head_all_of_the_input(name, size, x64):
    left_out, learned = attention(**{name: "identity_whole"}, head_size=size), attention(head_size=D)
    params = random_params(left_out)
    full = jax.tree.map(lambda x: x, params)
    kernels(full)[name] = {"kernel": jnp.broadcast_to(jnp.eye(D)[None, :, None], (2, D, H, D))}
    if name == "value":  # the size of queries and keys need not be that of values
        for each in ("query", "key"):
            assert kernels(params)[each]["kernel"].shape == (2, D, H, K)
            padded = jnp.pad(kernels(params)[each]["kernel"], ((0, 0),) * 3 + ((0, D - K),))
            kernels(full)[each] = {"kernel": padded * (D / K) ** 0.25}  # 1/sqrt(K) of the sizes given
    assert relative_error(logits(left_out, params), logits(learned, full)) < TOLERANCE["float64"]


def test_values_tied_to_keys_are_the_keys_and_are_cached_once(x64):
    tied, learned = attention(value="key"), attention()
    params = random_params(tied)
    full = jax.tree.map(lambda x: x, params)
    kernels(full)["value"] = kernels(full)["key"]
    assert relative_error(logits(tied, params), logits(learned, full)) < TOLERANCE["float64"]
    assert costs(tied).cache_bytes_per_token * 2 == costs(learned).cache_bytes_per_token
    assert costs(attention(value="key", position="rope")).cache_bytes_per_token == costs(learned).cache_bytes_per_token


# n width, m head size, h heads, p tokens: weights and forward FLOPs of the product of queries and keys, per layer.
@pytest.mark.parametrize("n, m, h, p", [(32, 8, 4, 8), (32, 32, 1, 8), (32, 20, 1, 40), (48, 6, 2, 5)])
def test_closed_forms_of_the_pair_and_of_the_merged_matrix(n, m, h, p):
    """Pair: 2 h n m weights, 2 (2 p n m + p^2 m) h FLOPs. Merged: h n^2 weights, 2 (p n^2 + p^2 n) h FLOPs."""
    found = {}
    for query in ("learned", "merged"):
        changes = {"width": n, "depth": 1, "blocks.main.attention.heads": h, "blocks.main.attention.head_size": m}
        total = costs(model(changes | {"blocks.main.attention.query": query}), p)
        found[query] = np.array([total.parameters, p * total.flops_per_token])
    pair, merged = (
        np.array([2 * h * n * m, 2 * h * (2 * p * n * m + p * p * m)]),
        np.array([h * n * n, 2 * h * (p * n * n + p * p * n)]),
    )
    np.testing.assert_array_equal(found["merged"] - found["learned"], merged - pair)
    cheaper = found["merged"] < found["learned"]
    assert cheaper[0] == (2 * m > n)  # fewer weights
    assert cheaper[1] == (n * n + p * n < 2 * n * m + p * m)  # fewer FLOPs: m = n, or nearly, and a short sequence


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": "identity", "head_size": 6}, r"query='identity' .* heads \* size = model.width=32, here 4 \* 6"),
        ({"value": "identity", "kv_heads": 2}, r"value='identity' .* here 2 \* 8"),
        ({"output": "identity", "head_size": 6}, r"output='identity' .* here 4 \* 6"),
        ({"rank": 3}, "rank=3 .* only query='merged' reads it"),
        ({"shaping": "shaped", "memory_slots": 2}, "'none' with memory_slots"),
        ({"shaping": "skip_init", "sees_itself": False}, "'none' with memory_slots.* or sees_itself=False"),
        ({"shaping": "shaped", "query": "identity"}, "unless query has a matrix"),
        ({"shaping": "shaped", "position": "alibi"}, "and position is not 'alibi'"),
        ({"query": "merged", "key": "identity"}, "left out under query='merged'"),
        ({"bias": ("query", "gate")}, "bias=.* names among the projections that are learned: query, key, value, output"),
        ({"bias": ("key",), "key": "identity"}, "names among the projections that are learned: query, value, output"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        attention(**changes)


def test_shaped_attention_starts_as_the_identity(x64):
    """He & Hofmann 2023, sec. 3: with W_Q = 0 the weights are C, so that aI + bA - cC = I when a = b = c."""
    from xfresearch.models.taps import Taps

    for changes in ({"shaping": "shaped"}, {"shaping": "skip_init"}, {"shaping": "shaped", "query": "merged"}):
        config = attention(**changes)
        params, taps = transformer.init(config, jax.random.key(0)), Taps(record=["blocks.1.attention.weights"])
        forward(config, params, tokens_for(config), taps=taps)
        expected = np.broadcast_to(np.eye(L), (2, H, L, L))
        np.testing.assert_allclose(taps.values["blocks.1.attention.weights"], expected, atol=1e-12)


def test_closed_forms_are_those_of_the_compiled_program():
    """XLA also counts elementwise work, which the two forms share but for the scaling of their queries."""
    found, expected = {}, {}
    for query in ("learned", "merged"):
        changes = {"width": 512, "depth": 1, "blocks.main.attention.heads": 2, "blocks.main.attention.query": query}
        config = model(changes)
        tokens_BL = tokens_for(config, batch=1, length=128)
        run = jax.jit(lambda params, config=config, tokens_BL=tokens_BL: forward(config, params, tokens_BL)[0])
        found[query] = run.lower(transformer.abstract(config)).compile().cost_analysis()["flops"]
        expected[query] = 128 * costs(config, 128).flops_per_token
        assert expected[query] < found[query] < 1.1 * expected[query]
    difference = expected["merged"] - expected["learned"]
    assert found["merged"] - found["learned"] == pytest.approx(difference, rel=0.02)
