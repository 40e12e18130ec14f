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
from xfresearch.kernels.grouped_matmul import choose_grouped_matmul, computed_rows, grouped_matmul


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


def sliced_rows(function, monkeypatch) -> int:
    """Rows that the products in `function` read, counted as its loops run."""
    counted = []

    def counting(x, row, block):
        jax.debug.callback(lambda _: counted.append(block), row)
        return jax.lax.dynamic_slice_in_dim(x, row, block)

    monkeypatch.setattr(module, "_slice", counting)
    jax.block_until_ready(function())
    jax.effects_barrier()
    return sum(counted)


@pytest.mark.parametrize("sizes", [(700, 0, 1, 129, 1218), (64, 3), (0, 0, 5)])
def test_computed_rows_are_those_of_every_block_that_runs(sizes, monkeypatch):
    """A forward product reads each block once; backward, x's gradient reads the same blocks once, w's both its sides."""
    x, w = jnp.ones((sum(sizes), 2)), jnp.ones((len(sizes), 2, 3))
    run = partial(grouped_matmul, sizes_E=jnp.array(sizes), implementation="blocked")
    rows = computed_rows(sizes)
    assert sliced_rows(lambda: run(x, w), monkeypatch) == rows
    both = sliced_rows(lambda: jax.grad(lambda x, w: run(x, w).sum(), (0, 1))(x, w), monkeypatch)
    assert both == rows + rows + 2 * rows


def loads(kind: str, choices=16 * 256 * 2, E=8) -> np.ndarray:
    """Choices of each expert [E], of 16 sequences of 256 tokens with top-2 of 8."""
    random = np.random.default_rng(0)
    shares = {
        "balanced": np.full(E, 1 / E),
        "skewed": 0.5 ** np.arange(1, E + 1),
        "one": np.eye(E)[3],
        "two": np.eye(E)[[2, 5]].mean(0),
    }
    return random.multinomial(choices, shares[kind] / shares[kind].sum())


@pytest.mark.parametrize("kind", ["balanced", "skewed", "one", "two"])
def test_a_dropless_layer_computes_at_most_half_more_than_its_active_experts(kind):
    sizes = loads(kind)
    assert sizes.sum() == 8192
    assert computed_rows(sizes) <= 1.5 * sizes.sum()
    worst = sizes.sum() + len(sizes) * (module.BLOCK - 1)  # whatever the load
    assert computed_rows(sizes) <= worst <= 1.5 * sizes.sum()


def test_choice():
    assert choose_grouped_matmul(backend="cpu").name == "blocked"
    assert choose_grouped_matmul(backend="tpu").name == choose_grouped_matmul("ragged", backend="cpu").name == "ragged"
    with pytest.raises(UserError, match="did you mean 'ragged'"):
        choose_grouped_matmul("raged")
