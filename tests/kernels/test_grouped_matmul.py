"""Grouped matrix products: against NumPy in float64, gradients against the loop over groups, and their cost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import TOLERANCE, relative_error
from xfresearch.errors import UserError
from xfresearch.kernels import grouped_matmul as module
from xfresearch.kernels.grouped_matmul import choose_grouped_matmul, grouped_matmul


def reference(x, w, sizes):
    return np.stack([x[t] @ w[e] for t, e in enumerate(np.repeat(np.arange(len(sizes)), sizes))])


def reference_gradients(x, w, sizes, dy):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    for t, e in enumerate(groups):
        dx[t] = w[e] @ dy[t]
        dw[e] += np.outer(x[t], dy[t])
    return dx, dw


def check(implementation, sizes, D, F, seed, dtype):
    rng = np.random.default_rng(seed)
    x, w, dy = (jnp.asarray(rng.normal(size=s), dtype) for s in ((sum(sizes), D), (len(sizes), D, F), (sum(sizes), F)))
    function = jax.jit(partial(grouped_matmul, sizes_E=jnp.asarray(sizes), implementation=implementation))
    y, vjp = jax.vjp(function, x, w)
    assert y.dtype == x.dtype
    exact = [np.asarray(a, np.float64) for a in (x, w, dy)]
    expected = reference(*exact[:2], sizes), *reference_gradients(*exact[:2], sizes, exact[2])
    for actual, e in zip((y, *vjp(dy)), expected, strict=True):
        assert relative_error(actual, e) < TOLERANCE[dtype]


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_values_and_gradients(sizes, D, F, seed):
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 4)  # so that small groups need several blocks, whole and not
        for implementation in ("blocked", "ragged"):
            check(implementation, sizes, D, F, seed, "float64")


@pytest.mark.parametrize("implementation", ["blocked", "ragged"])
@pytest.mark.parametrize("sizes", [(300, 0, 7, 128), (0, 0, 200, 0), (0, 435), (1, 1, 1)])
def test_float32(implementation, sizes):
    check(implementation, sizes, 8, 6, 0, "float32")


def test_bfloat16():
    check("blocked", (30, 0, 7), 8, 6, 0, "bfloat16")


def test_transformations():
    """vmap over rows and weights, and scan over layers under remat: each equals the loop over groups."""
    rng = np.random.default_rng(0)
    x, w, sizes = rng.normal(size=(3, 20, 4)), rng.normal(size=(3, 2, 4, 4)), np.array([[5, 15], [20, 0], [0, 20]])
    with jax.enable_x64(True):
        y = jax.vmap(partial(grouped_matmul, implementation="blocked"))(x, w, sizes)
        for i in range(3):
            assert relative_error(y[i], reference(x[i], w[i], sizes[i])) < TOLERANCE["float64"]

        def layers(implementation, w):
            step = jax.checkpoint(lambda x, w: (grouped_matmul(x, w, sizes[0], implementation=implementation), None))
            return jax.lax.scan(step, jnp.asarray(x[0]), w)[0].sum()

        actual, expected = (jax.jit(jax.grad(partial(layers, i)))(jnp.asarray(w)) for i in ("blocked", "ragged"))
        assert relative_error(actual, expected) < TOLERANCE["float64"]


def multiplied_rows(sizes) -> int:
    return sum(-(-size // module.BLOCK) * module.BLOCK for size in sizes)


def test_rows_multiplied():
    """Every block is counted as it runs: groups of T rows in all cost less than T + E blocks, not E T."""
    sizes, counted = (700, 0, 1, 129, 1218), []
    patch = pytest.MonkeyPatch()

    def counting(x, row, block):
        jax.debug.callback(lambda _: counted.append(block), row)
        return jax.lax.dynamic_slice_in_dim(x, row, block)

    with patch.context() as p:
        p.setattr(module, "_slice", counting)
        grouped_matmul(
            jnp.ones((2048, 2)), jnp.ones((5, 2, 3)), jnp.array(sizes), implementation="blocked"
        ).block_until_ready()
        jax.effects_barrier()
    assert sum(counted) == multiplied_rows(sizes) <= 2048 + 5 * module.BLOCK


def test_choice():
    assert choose_grouped_matmul(backend="cpu").name == "blocked"
    assert choose_grouped_matmul(backend="tpu").name == choose_grouped_matmul("ragged", backend="cpu").name == "ragged"
    with pytest.raises(UserError, match="did you mean 'ragged'"):
        choose_grouped_matmul("raged")
