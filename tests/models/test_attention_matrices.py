"""Attention without some of its matrices: an equivalent model for each form, and its parameters and FLOPs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import capture, forward
from tests.contracts.variants import in_float64, model, random_params, tokens_for
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import transformer
from xfresearch.run_config.closed_form import costs
from xfresearch.runtime.errors import UserError

D, H, K, L = 32, 4, 8, 8


def attention(**changes):
    return in_float64(model({f"blocks.main.attention.{name}": value for name, value in changes.items()}))


def kernels(params):
    return params["blocks"]["main"]["attention"]


def logits(config, params):
    return forward(config, params, tokens_for(config))[0]


def test_merged_equals_the_product_of_query_and_key(x64):
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
def test_only_the_named_projections_have_a_bias(names, x64):
    config = attention(bias=names)
    params = kernels(transformer.abstract(config))
    assert {name for name, matrix in params.items() if "bias" in matrix} == set(names)
    assert config == attention(bias=names[::-1]), "the order of the names does not matter"


@pytest.mark.parametrize("name, heads", [("query", H), ("key", H), ("value", H), ("output", H)])
def test_identity_equals_an_identity_kernel(name, heads, x64):
    """Head h reads (or writes) the h-th slice of the stream."""
    left_out, learned = attention(**{name: "identity"}), attention()
    params = random_params(left_out)
    eye = jnp.eye(D).reshape((D, H, K) if name != "output" else (H, K, D))
    full = jax.tree.map(lambda x: x, params)
    kernels(full)[name] = {"kernel": jnp.stack([eye] * 2)}
    assert relative_error(logits(left_out, params), logits(learned, full)) < TOLERANCE["float64"]


def test_identity_plus_equals_a_sum_of_kernels_and_has_two_more_parameters(x64):
    plus, learned = attention(value="identity_plus"), attention()
    params = random_params(plus)
    full = jax.tree.map(lambda x: x, params)
    part = kernels(full)["value"]
    a, b = (part[name][:, None, None, None] for name in ("identity_gain", "weight_gain"))
    kernels(full)["value"] = {"kernel": a * jnp.eye(D).reshape(D, H, K) + b * part["kernel"]}
    assert relative_error(logits(plus, params), logits(learned, full)) < TOLERANCE["float64"]
    assert costs(plus).parameters == costs(learned).parameters + 2 * 2
    with pytest.raises(UserError, match="value='identity_plus'.* 'identity_plus' only if"):
        attention(value="identity_plus", kv_heads=2)


@pytest.mark.parametrize("name, size", [("query", D), ("key", D), ("value", K)])
def test_identity_whole_gives_every_head_the_whole_input(name, size, x64):
    left_out, learned = attention(**{name: "identity_whole"}, head_size=size), attention(head_size=D)
    params = random_params(left_out)
    full = jax.tree.map(lambda x: x, params)
    kernels(full)[name] = {"kernel": jnp.broadcast_to(jnp.eye(D)[None, :, None], (2, D, H, D))}
    if name == "value":  # queries and keys have another size than values
        for each in ("query", "key"):
            assert kernels(params)[each]["kernel"].shape == (2, D, H, K)
            padded = jnp.pad(kernels(params)[each]["kernel"], ((0, 0),) * 3 + ((0, D - K),))
            kernels(full)[each] = {"kernel": padded * (D / K) ** 0.25}  # 1/sqrt(K) of each size
    assert relative_error(logits(left_out, params), logits(learned, full)) < TOLERANCE["float64"]


def test_values_tied_to_keys_equal_the_keys_and_are_cached_once(x64):
    tied, learned = attention(value="key"), attention()
    params = random_params(tied)
    full = jax.tree.map(lambda x: x, params)
    kernels(full)["value"] = kernels(full)["key"]
    assert relative_error(logits(tied, params), logits(learned, full)) < TOLERANCE["float64"]
    assert costs(tied).cache_bytes_per_token * 2 == costs(learned).cache_bytes_per_token
    assert costs(attention(value="key", position="rope")).cache_bytes_per_token == costs(learned).cache_bytes_per_token


# n width, m head size, h heads, p tokens: parameters and forward FLOPs of the product of queries and keys, per layer.
@pytest.mark.parametrize("n, m, h, p", [(32, 8, 4, 8), (32, 32, 1, 8), (32, 20, 1, 40), (48, 6, 2, 5)])
def test_closed_forms_of_the_pair_and_of_the_merged_matrix(n, m, h, p):
    """Pair: 2 h n m parameters, 2 (2 p n m + p^2 m) h FLOPs. Merged: h n^2 parameters, 2 (p n^2 + p^2 n) h FLOPs."""
    forms = {}
    for query in ("learned", "merged"):
        changes = {"width": n, "depth": 1, "blocks.main.attention.heads": h, "blocks.main.attention.head_size": m}
        total = costs(model(changes | {"blocks.main.attention.query": query}), p)
        forms[query] = np.array([total.parameters, p * total.flops_per_token])
    pair = np.array([2 * h * n * m, 2 * h * (2 * p * n * m + p * p * m)])
    merged = np.array([h * n * n, 2 * h * (p * n * n + p * p * n)])
    np.testing.assert_array_equal(forms["merged"] - forms["learned"], merged - pair)
    cheaper = forms["merged"] < forms["learned"]
    assert cheaper[0] == (2 * m > n)  # fewer parameters
    assert cheaper[1] == (n * n + p * n < 2 * n * m + p * m)  # fewer FLOPs: m close to n, short sequence


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": "identity", "head_size": 6}, r"query='identity' .* heads \* size = model.width=32, here 4 \* 6"),
        ({"value": "identity", "kv_heads": 2}, r"value='identity' .* here 2 \* 8"),
        ({"output": "identity", "head_size": 6}, r"output='identity' .* here 4 \* 6"),
        ({"rank": 3}, "rank=3 .* read only with query='merged'"),
        ({"shaping": "shaped", "memory_slots": 2}, "'none' with memory_slots"),
        ({"shaping": "skip_init", "sees_itself": False}, "'none' with memory_slots.* or sees_itself=False"),
        ({"shaping": "shaped", "query": "identity"}, "unless query has a matrix"),
        ({"shaping": "shaped", "position": "alibi"}, "and position is not 'alibi'"),
        ({"query": "merged", "key": "identity"}, "left at 'learned' with query='merged'"),
        ({"bias": ("query", "gate")}, "bias=.* names of learned projections: query, key, value, output"),
        ({"bias": ("key",), "key": "identity"}, "names of learned projections: query, value, output"),
    ],
)
def test_invalid_combinations_are_errors(changes, message):
    with pytest.raises(UserError, match=message):
        attention(**changes)


def test_shaped_attention_starts_as_the_identity(x64):
    """He & Hofmann 2023, sec. 3: with W_Q = 0, A = C, so aI + bA - cC is proportional to I if a = b = c."""
    for changes in ({"shaping": "shaped"}, {"shaping": "skip_init"}, {"shaping": "shaped", "query": "merged"}):
        config = attention(**changes)
        params = transformer.init(config, jax.random.key(0))
        (weights_BHLS,) = capture(config, params, tokens_for(config), ["blocks.1.attention.weights"])
        expected = np.broadcast_to(np.eye(L), (2, H, L, L))
        np.testing.assert_allclose(weights_BHLS, expected, atol=1e-12)


def test_closed_forms_match_the_compiled_program():
    """XLA also counts elementwise work. It is equal in the two forms, except for the scaling of the queries."""
    actual, expected = {}, {}
    for query in ("learned", "merged"):
        changes = {"width": 512, "depth": 1, "blocks.main.attention.heads": 2, "blocks.main.attention.query": query}
        config = model(changes)
        tokens_BL = tokens_for(config, batch=1, length=128)
        run = jax.jit(lambda params, config=config, tokens_BL=tokens_BL: forward(config, params, tokens_BL)[0])
        actual[query] = run.lower(transformer.abstract(config)).compile().cost_analysis()["flops"]
        expected[query] = 128 * costs(config, 128).flops_per_token
        assert expected[query] < actual[query] < 1.1 * expected[query]
    difference = expected["merged"] - expected["learned"]
    assert actual["merged"] - actual["learned"] == pytest.approx(difference, rel=0.02)
