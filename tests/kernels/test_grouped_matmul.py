"""Grouped matrix products: values and gradients against NumPy in float64, and their cost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import print_saved_residuals

from tests.daily import daily
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.kernels import blocked_rows
from xfresearch.kernels.blocked_rows import computed_rows
from xfresearch.kernels.grouped_matmul import (
    BLOCKS,
    Call,
    choose_grouped_matmul,
    grouped,
    grouped_matmul,
    rows_per_block,
)
from xfresearch.kernels.megablox import megablox
from xfresearch.runtime.errors import UserError


def reference(x, w, sizes):
    return np.stack([x[t] @ w[e] for t, e in enumerate(np.repeat(np.arange(len(sizes)), sizes))])


def reference_gradients(x, w, sizes, dy):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    dx = np.zeros(x.shape)
    dw = np.zeros(w.shape)
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
def test_values_and_gradients_equal_numpy(sizes, D, F, seed):
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setitem(BLOCKS, "cpu", 4)  # so that small groups need several blocks, full and partial ones
        for implementation in ("blocked", "ragged"):
            check(implementation, sizes, D, F, seed, "float64")


@pytest.mark.parametrize("implementation", ["blocked", "ragged"])
@pytest.mark.parametrize("sizes", [(300, 0, 7, 128), (0, 0, 200, 0), (0, 435), (1, 1, 1)])
def test_values_and_gradients_in_float32(implementation, sizes):
    check(implementation, sizes, 8, 6, 0, "float32")


def test_values_and_gradients_in_bfloat16():
    check("blocked", (30, 0, 7), 8, 6, 0, "bfloat16")


def expert(products, x, gate):
    """An expert with three matrices, of which two read the rows and have different widths."""
    a, b = products(x, ("up", "narrow"))
    return products(jnp.sin(a) * b[:, :1] * gate, ("down",), gate)[0]


@pytest.mark.parametrize("saved", [(), ("up",), ("up", "down")])
def test_a_whole_expert_in_blocks_equals_its_products_alone(saved, x64, monkeypatch):
    """Values, and gradients of rows, gates, matrices and biases, which `ragged` has from NumPy's products in
    test_biases_of_groups; the rows beyond the groups are zeros and have no gradient."""
    monkeypatch.setitem(BLOCKS, "cpu", 8)
    rng = np.random.default_rng(0)
    sizes = np.array([13, 0, 8, 3])
    x, gate, dy = (rng.normal(size=shape) for shape in ((30, 4), (30, 1), (30, 3)))
    shapes = {"up": (4, 4, 5), "up_bias": (4, 5), "narrow": (4, 4, 2), "down": (4, 5, 3), "down_bias": (4, 3)}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}

    def run(implementation, x, gate, weights):
        return grouped(expert, (x, gate), weights, sizes, saved=saved, whole=False, implementation=implementation)

    (y, vjp), (expected, expected_vjp) = (jax.vjp(partial(run, name), x, gate, weights) for name in ("blocked", "ragged"))
    assert not y[24:].any() and y[:24].all()
    for actual, e in zip(jax.tree.leaves((y, vjp(dy))), jax.tree.leaves((expected, expected_vjp(dy))), strict=True):
        assert relative_error(actual, e) < TOLERANCE["float64"]


def test_matrices_that_read_the_same_rows_are_one_grouped_product_whose_copy_is_not_kept(capsys):
    """Two products for three matrices, and four for their gradients; with few rows three and six."""
    sizes = jnp.array([2, 12])
    weights = {"up": jnp.ones((2, 4, 5)), "narrow": jnp.ones((2, 4, 2)), "down": jnp.ones((2, 5, 3))}

    def run(x, weights):
        return grouped(expert, (x, x[:, :1]), weights, sizes, implementation="ragged").sum()

    def products(T: int) -> list[int]:
        traced = (jax.make_jaxpr(f)(jnp.ones((T, 4)), weights) for f in (run, jax.grad(run, (0, 1))))
        return [str(each).count("ragged_dot_general[") for each in traced]

    assert products(14) == [2, 6] and products(13) == [3, 9]
    print_saved_residuals(run, jnp.ones((14, 4)), weights)
    kept = capsys.readouterr().out
    assert "f32[2,4,5]" in kept and "f32[2,4,7]" not in kept


@pytest.mark.parametrize("implementation", ["ragged", "blocked"])
def test_biases_of_groups(implementation, x64):
    """y_t = x_t w_e + g_t b_e, and the gradients of b and g, by NumPy, row by row."""
    rng = np.random.default_rng(1)
    sizes = np.array([3, 0, 4])
    x, gate, w, b, dy = (rng.normal(size=s) for s in ((7, 2), (7, 1), (3, 2, 5), (3, 5), (7, 5)))

    def run(gate, b):
        weights = {"w": w, "w_bias": b}
        return grouped(lambda p, x, g: p(x, ("w",), g)[0], (x, gate), weights, sizes, implementation=implementation)

    y, vjp = jax.vjp(run, gate, b)
    expert_T = np.repeat(np.arange(3), sizes)
    expected_b = np.zeros_like(b)
    np.add.at(expected_b, expert_T, gate * dy)
    expected = reference(x, w, sizes) + gate * b[expert_T], (dy * b[expert_T]).sum(1, keepdims=True), expected_b
    for actual, e in zip((y, *vjp(dy)), expected, strict=True):
        assert relative_error(actual, e) < TOLERANCE["float64"]


def test_transformations_of_blocked():
    """vmap over rows and weights equals NumPy; scan over layers under remat equals `ragged`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 20, 4))
    w = rng.normal(size=(3, 2, 4, 4))
    sizes = np.array([[5, 15], [20, 0], [0, 20]])
    with jax.enable_x64(True):
        y = jax.vmap(partial(grouped_matmul, implementation="blocked"))(x, w, sizes)
        for i in range(3):
            assert relative_error(y[i], reference(x[i], w[i], sizes[i])) < TOLERANCE["float64"]

        def layers(implementation, w):
            step = jax.checkpoint(lambda x, w: (grouped_matmul(x, w, sizes[0], implementation=implementation), None))
            return jax.lax.scan(step, jnp.asarray(x[0]), w)[0].sum()

        actual, expected = (jax.jit(jax.grad(partial(layers, i)))(jnp.asarray(w)) for i in ("blocked", "ragged"))
        assert relative_error(actual, expected) < TOLERANCE["float64"]


def rows_of_blocks(function, monkeypatch) -> int:
    """Number of rows in the blocks that `function` computes, counted at run time."""
    counted = []
    place = blocked_rows._place

    def counting(start, size, i, block, T):
        jax.debug.callback(lambda _: counted.append(block), i)
        return place(start, size, i, block, T)

    with monkeypatch.context() as patch:
        patch.setattr(blocked_rows, "_place", counting)
        jax.block_until_ready(function())
        jax.effects_barrier()
    return sum(counted)


@pytest.mark.parametrize("sizes", [(700, 0, 1, 129, 1218), (64, 3), (0, 0, 5)])
def test_computed_rows_equals_the_rows_of_all_blocks_at_run_time(sizes, monkeypatch):
    """The forward and the backward pass compute each block once."""
    x = jnp.ones((sum(sizes), 2))
    w = jnp.ones((len(sizes), 2, 3))
    run = partial(grouped_matmul, sizes_E=jnp.array(sizes), implementation="blocked")
    rows = computed_rows(sizes, rows_per_block("cpu", sum(sizes), len(sizes)))
    assert rows_of_blocks(lambda: run(x, w), monkeypatch) == rows
    both = rows_of_blocks(lambda: jax.grad(lambda x, w: run(x, w).sum(), (0, 1))(x, w), monkeypatch)
    assert both == 2 * rows


def test_blocks_are_at_most_half_of_an_average_group_but_not_tiny():
    assert [rows_per_block("cpu", 8 * size, 8) for size in (1, 63, 64, 300, 512, 4096)] == [32, 32, 32, 128, 256, 256]
    assert rows_per_block("gpu", 65_536, 8) == 512


def loads(kind: str, choices=16 * 256 * 2, E=8) -> np.ndarray:
    """The number of tokens of each expert [E], for 16 sequences of 256 tokens with top-2 of 8."""
    random = np.random.default_rng(0)
    shares = {
        "balanced": np.full(E, 1 / E),
        "skewed": 0.5 ** np.arange(1, E + 1),
        "one": np.eye(E)[3],
        "two": np.eye(E)[[2, 5]].mean(0),
    }
    return random.multinomial(choices, shares[kind] / shares[kind].sum())


@pytest.mark.parametrize("kind", ["balanced", "skewed", "one", "two"])
def test_a_dropless_layer_computes_at_most_half_more_rows_than_its_active_experts_need(kind):
    sizes = loads(kind)
    assert sizes.sum() == 8192
    block = rows_per_block("cpu", int(sizes.sum()), len(sizes))
    worst = sizes.sum() + len(sizes) * (block - 1)  # for any load
    assert computed_rows(sizes, block) <= worst <= 1.5 * sizes.sum()


SIZES = [((300, 0, 7, 128),), ((0, 0, 200, 0),), ((0, 435),), ((1, 1, 1),), ((0, 0, 0),), ((600, 0, 100, 0),)]


@pytest.mark.parametrize("sizes", daily([((300, 0, 7, 128),), ((0, 0, 0),), ((600, 0, 100, 0),)], SIZES))
@pytest.mark.parametrize("beyond", [150, pytest.param(0, marks=pytest.mark.long)])
def test_megablox_in_the_interpreter_equals_numpy(sizes, beyond):
    """Also with NaN in rows beyond the last group. Tiles of the smallest size, and several tiles in one dimension."""
    rng = np.random.default_rng(0)
    T = sum(sizes)
    if T + beyond == 0:
        return
    x, w, dy = (rng.normal(size=s).astype(np.float32) for s in ((T + beyond, 8), (len(sizes), 8, 6), (T + beyond, 6)))
    x[T:] = np.nan
    dy[T:] = 0  # grouped_matmul hides these rows
    kind = "TPU v6 lite" if beyond else "TPU v5 lite"
    y, vjp = jax.vjp(lambda x, w: megablox(x, w, jnp.asarray(sizes), kind, interpret=True), x, w)
    dx, dw = vjp(jnp.asarray(dy))
    exact = [np.asarray(a, np.float64) for a in (x[:T], w, dy[:T])]
    expected = (
        reference(*exact[:2], sizes) if T else np.zeros((0, 6)),
        *reference_gradients(*exact[:2], sizes, exact[2]),
    )
    for actual, e in zip((y[:T], dx[:T], dw), expected, strict=True):
        assert relative_error(actual, e) < TOLERANCE["float32"]


@pytest.mark.parametrize("implementation", ["blocked", "ragged"])
def test_rows_beyond_the_groups_are_zeros_without_gradient(implementation, x64):
    """They add nothing to any gradient, even if their own gradient is NaN."""
    rng = np.random.default_rng(0)
    sizes = np.array([3, 0, 140, 2])
    x = rng.normal(size=(200, 8))
    w = rng.normal(size=(4, 8, 6))
    dy = rng.normal(size=(200, 6))
    dy[145:] = np.nan
    run = partial(grouped_matmul, sizes_E=jnp.asarray(sizes), implementation=implementation, whole=False)
    y, vjp = jax.vjp(run, x, w)
    dx, dw = vjp(jnp.asarray(dy))
    assert not y[145:].any()
    expected = reference(x, w, sizes), *reference_gradients(x[:145], w, sizes, dy)
    for actual, e in zip((y[:145], dx[:145], dw), expected, strict=True):
        assert relative_error(actual, e) < TOLERANCE["float64"]


@pytest.mark.parametrize(
    "call, name",
    [
        (Call("cpu"), "blocked"),
        (Call("gpu", "bfloat16"), "ragged"),
        (Call("tpu", "bfloat16"), "megablox"),
        (Call("tpu", "float64"), "ragged"),
    ],
)
def test_choice_by_platform_and_dtype(call, name):
    choice = choose_grouped_matmul(call)
    assert choice.name == name and choice.reason
    assert choose_grouped_matmul(call, "blocked") == ("blocked", "selected by name")


def test_an_unknown_or_unsupported_kernel_is_refused():
    with pytest.raises(UserError, match="did you mean 'ragged'"):
        choose_grouped_matmul(Call("cpu"), "raged")
    reason = "config.training.expert_kernel='megablox' is not allowed here: it needs a TPU, and the platform is gpu"
    with pytest.raises(UserError, match=reason):
        choose_grouped_matmul(Call("gpu"), "megablox")
    with pytest.raises(UserError, match="it does not support float64"):
        choose_grouped_matmul(Call("tpu", "float64"), "megablox")
