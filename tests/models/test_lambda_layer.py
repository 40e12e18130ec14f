"""Causal lambda layers: numerical stability, size of the state, cost, and separate documents, for every chunking."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from tests.contracts.passes import forward
from tests.contracts.variants import in_float64, model, random_params, tree_error
from tests.models.test_decoding import check_cached_logits
from tests.models.test_errors import assert_one_line
from tests.tolerances import TOLERANCE, relative_error
from tests.variants.lambda_layer import mix_by_lambdas
from xfresearch.kernels.lambda_scan import empty_state, flops_per_token, lambda_scan
from xfresearch.models import transformer
from xfresearch.models.counting import count_flops
from xfresearch.runtime.errors import UserError

A = "blocks.main.attention."
LAMBDA = {A + "kind": "lambda", A + "lambdas.window": 5}
B, L, H, K, U, V, R = 2, 20, 3, 4, 2, 5, 6

KEYS = {  # added to random keys at each position
    "rising": np.linspace(-1000, 1000, L),
    "falling": np.linspace(1000, -1000, L),
    "alternating": 1000.0 * (-1) ** np.arange(L),
    "one early spike": 1000.0 * (np.arange(L) == 2),
    "large and rising": 1000.0 + 2 * np.arange(L),
    "large and falling": 1000.0 - np.arange(L),
}
ONE = [1] * L
PACKED = [1] * 3 + [2] + [3] * 8 + [4] * 5 + [0] * 3
compiled_scan = jax.jit(lambda_scan, static_argnums=6)


def inputs(dtype, keys=0.0, length=L, window=R):
    """Queries, keys, values and distances, the same numbers in every dtype."""
    random = np.random.default_rng(0)
    shapes = [(B, length, H, K), (B, length, U, K), (B, length, U, V), (window, U, K)]
    q, k, v, e = (random.standard_normal(shape) for shape in shapes)
    return [jnp.asarray(x.astype("float32"), dtype) for x in (q, k + np.reshape(keys, (-1, 1, 1)), v, e)]


def scanned(arrays, segments, chunk, pieces=(), window=R):
    """y_BLHV, from calls on `pieces` tokens each that pass the state on, or from one call."""
    q, k, v, e = arrays
    state = empty_state(B, window, U, K, V, q.dtype)
    ends = np.cumsum(pieces or [q.shape[1]])
    parts = []
    for start, end in zip([0, *ends], ends, strict=False):
        segments_BL = jnp.broadcast_to(jnp.asarray(segments[start:end], jnp.int32), (B, end - start))
        part = (x[:, start:end] for x in (q, k, v))
        y_BLHV, state = compiled_scan(*part, e, segments_BL, state, chunk)
        parts.append(y_BLHV)
    return jnp.concatenate(parts, 1)


def expected(arrays, segments):
    """The NumPy reference, row by row."""
    *rows, e = (np.asarray(x, np.float64) for x in arrays)
    parts = ([list(x.swapaxes(0, 1)) for x in row] for row in zip(*rows, strict=True))
    return np.stack([mix_by_lambdas(*row, e, segments) for row in parts]).reshape(B, -1, H, V)


def dense(arrays, segments):
    """y_BLHV from all pairs of positions at once. Its gradients in float64 are the reference for gradients."""
    q, k, v, e = arrays
    back = np.arange(L)[:, None] - np.arange(L)
    sees = (back >= 0) & np.equal.outer(segments, segments)
    logits = jnp.where(sees[None, :, :, None, None], k[:, None], -jnp.inf)
    w = jax.nn.softmax(logits, 2) + jnp.where((sees & (back < R))[..., None, None], e[back.clip(0, R - 1)], 0)
    return jnp.einsum("bnhk,bnmuk,bmuv->bnhv", q, w, v)


@pytest.mark.parametrize("segments", [ONE, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize("keys", KEYS)
def test_large_keys_are_accurate_in_float32(keys, segments, x64):
    """Also if a document with large keys precedes one with small keys."""
    narrow, wide = (inputs(dtype, KEYS[keys]) for dtype in ("float32", "float64"))
    assert relative_error(scanned(narrow, segments, 8), expected(wide, segments)) < TOLERANCE["float32"]
    weights = np.random.default_rng(1).standard_normal((B, L, H, V))
    assert relative_error(dense(wide, segments), expected(wide, segments)) < TOLERANCE["float64"]
    result = jax.jit(jax.grad(lambda x: (weights.astype("float32") * scanned(x, segments, 8)).sum()))(narrow)
    exact = jax.grad(lambda x: (weights * dense(x, segments)).sum())(wide)
    assert all(np.isfinite(each).all() for each in result)
    assert tree_error(result, exact) < TOLERANCE["float32"]


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("pieces", [(), (1, 2, 9, 8), (1,) * 20], ids=["one call", "1+2+9+8", "one by one"])
def test_packed_documents_equal_the_reference_with_every_chunking(chunk, pieces, x64):
    """Documents end inside chunks, between chunks, and between calls that pass the state on."""
    arrays = inputs("float64")
    assert relative_error(scanned(arrays, PACKED, chunk, pieces), expected(arrays, PACKED)) < TOLERANCE["float64"]


@pytest.mark.parametrize("window", [1, 2, 19, 20, 30])
def test_windows_shorter_and_longer_than_the_sequence_equal_the_reference(window, x64):
    arrays = inputs("float64", window=window)
    for pieces in ((), (3, 17)):
        result = scanned(arrays, ONE, 8, pieces, window)
        assert relative_error(result, expected(arrays, ONE)) < TOLERANCE["float64"]


def test_bfloat16_inputs_are_summed_in_float32():
    arrays = inputs("bfloat16")
    result = scanned(arrays, ONE, 8)
    assert result.dtype == "bfloat16"
    assert relative_error(result, expected(arrays, ONE)) < TOLERANCE["bfloat16"]


def traced(length, chunk, window=R):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs("float32", 0.0, length, window)]
    return lambda *arrays: scanned(arrays, [1] * length, chunk, window=window), shapes


@pytest.mark.parametrize("length, chunk, window", [(1, 8, 6), (5, 8, 1), (8, 8, 6), (9, 8, 20), (23, 8, 6), (24, 8, 6)])
def test_flops_equal_the_count_at_every_length(length, chunk, window):
    run, shapes = traced(length, chunk, window)
    assert count_flops(run, *shapes) == B * length * flops_per_token(length, chunk, window, U, H, K, V)


@pytest.mark.parametrize("length", [16, 37])
def test_cost_is_linear_in_the_length(length):
    (run, shapes), (longer, longer_shapes) = traced(length, 8), traced(2 * length, 8)
    assert count_flops(longer, *longer_shapes) == 2 * count_flops(run, *shapes)


def largest(jaxpr) -> int:
    """Elements of the largest array that a program computes."""
    inner = (largest(getattr(j, "jaxpr", j)) for e in jaxpr.eqns for j in core.jaxprs_in_params(e.params))
    return max([0, *inner, *(v.aval.size for e in jaxpr.eqns for v in e.outvars)])


def test_no_array_holds_a_lambda_per_position_or_all_pairs():
    length = 4096
    run, shapes = traced(length, 8)
    gradient = jax.grad(lambda *arrays: run(*arrays).sum(), (0, 1, 2, 3))
    for fn in (run, gradient):
        assert largest(jax.make_jaxpr(fn)(*shapes).jaxpr) < B * length * K * V  # which is below L^2


def cache_bytes(changes, length) -> int:
    config = model(LAMBDA | changes)
    make = lambda params: transformer.bind(config, params).init_caches(1, length)  # noqa: E731
    return sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make, transformer.abstract(config)))
    )


def test_the_state_is_constant_for_a_local_window_and_grows_by_values_for_a_global_one():
    assert cache_bytes({}, 8) == cache_bytes({}, 10_000)
    far = {A + "lambdas.window": 0, A + "lambdas.depth": 2}
    assert cache_bytes(far, 31) - cache_bytes(far, 30) == 2 * 2 * 8 * 4  # layers, depth, value size, bytes
    assert cache_bytes(far, 64) == cache_bytes(far, 10_000)  # max_length is 64


@pytest.mark.parametrize("window", [5, 0])
def test_left_padded_prompts_decode_like_single_ones(window, x64):
    check_cached_logits(in_float64(model(LAMBDA | {A + "lambdas.window": window, A + "lambdas.chunk": 6})), "unroll")


def test_logits_of_a_sequence_of_padding_are_finite():
    config = model(LAMBDA)
    tokens_BL = np.zeros((2, 8), np.int32)
    logits, _ = forward(config, random_params(config), tokens_BL, segments_BL=tokens_BL)
    assert np.isfinite(logits).all()


def test_initial_outputs_do_not_grow_with_the_window():
    """A position lambda sums R U values times K query entries. The std of the distances accounts for this."""
    for window in (4, 64):
        params = transformer.init(model({"width": 128} | LAMBDA | {A + "lambdas.window": window}), jax.random.key(0))
        distances = params["blocks"]["main"]["attention"]["distances"]
        assert float(distances.std()) == pytest.approx(0.98658 * (window * 16) ** -0.5, rel=0.1)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({A + "kv_heads": 2}, ["attention.kv_heads=2", "there is no such option", "kind, heads, lambdas"]),
        ({A + "lambdas.window": 0, "max_length": 0}, ["model.max_length=0", "at least 1", "lambdas.window=0"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_invalid_combinations_are_errors(changes, words):
    with pytest.raises(UserError) as error:
        model(LAMBDA | changes)
    assert_one_line(error, words)
