"""Attention to slots alone: values and gradients against the plain kernel, in blocks of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import TOLERANCE, relative_error
from xfresearch.kernels import slots_attention as kernel
from xfresearch.kernels.plain_attention import mix, scores
from xfresearch.kernels.slots_attention import slots_attention
from xfresearch.kernels.softcap import softcapped

B, L, K, V, M, SCALE = 2, 5, 4, 3, 6, 0.7


def plain(q_BLHK, key_MGK, value_MGV, softcap):
    logits = softcapped(scores(q_BLHK, key_MGK) * SCALE * K**0.5, softcap)
    return mix(jax.nn.softmax(logits, -1), value_MGV)


def check(heads, kv_heads, rows, softcap, dtype, monkeypatch):
    monkeypatch.setitem(kernel.WEIGHTS, "cpu", rows * M)
    rng = np.random.default_rng(0)
    shapes = (B, L, heads, K), (M, kv_heads, K), (M, kv_heads, V), (B, L, heads, V)
    *inputs, do = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    o, vjp = jax.vjp(jax.jit(lambda *x: slots_attention(*x, SCALE, softcap)), *inputs)
    wide = [jnp.asarray(x, jnp.promote_types(dtype, jnp.float32)) for x in (*inputs, do)]
    expected, expected_vjp = jax.vjp(lambda *x: plain(*x, softcap), *wide[:3])
    assert o.dtype == do.dtype
    for actual, e in zip((o, *vjp(do)), (expected, *expected_vjp(wide[3])), strict=True):
        assert relative_error(actual, e) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "heads, kv_heads, rows, softcap",
    [
        (2, 2, 100, 0.0),  # all rows in one block
        (4, 2, 7, 2.0),  # 20 rows of a head in 3 blocks, the last one with padding
        (4, 1, 10, 0.0),
    ],
)
def test_values_and_gradients_equal_plain_attention(heads, kv_heads, rows, softcap, x64, monkeypatch):
    check(heads, kv_heads, rows, softcap, "float64", monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes(dtype, monkeypatch):
    check(4, 2, 7, 2.0, dtype, monkeypatch)


def test_no_array_has_the_weights_of_all_rows(monkeypatch):
    """The weights of one head and block are the largest array of the forward and the backward pass."""
    monkeypatch.setitem(kernel.WEIGHTS, "cpu", 10 * 64)
    q, slots = jnp.ones((4, 50, 2, 2)), jnp.ones((64, 2, 2))
    text = jax.jit(jax.grad(lambda q, k: slots_attention(q, k, k, 1.0).sum(), (0, 1))).lower(q, slots).as_text()
    assert "10x64xf32" in text
    assert not any(f"{rows}x64xf32" in text for rows in (20, 50, 200, 400))
