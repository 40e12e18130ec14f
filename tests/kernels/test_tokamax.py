"""tokamax's kernels against ours: on a CPU with its plain implementations, on a GPU with the real ones against float32."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels import attention_cases
from tests.kernels.attention_cases import draw, error, plain, value_and_gradients
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.kernels import tokamax_kernels
from xfresearch.kernels.masks import CAUSAL, EVERYTHING, Mask
from xfresearch.kernels.tokamax_kernels import refuse_tokamax, tokamax_attention, tokamax_ragged_dot
from xfresearch.runtime.errors import UserError

installed = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="needs tokamax (Python 3.12): pip install 'xfresearch[gpu]'"
)
on_gpu = pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs a GPU: tokamax's kernels run only there")


def of_query(q_BLHK, distance_LS):
    """A bias [B, H, L, S] that hides the keys more than seven tokens away."""
    bias = 0.1 * q_BLHK.sum(-1).swapaxes(1, 2)[..., None] * distance_LS
    return jnp.where(jnp.abs(distance_LS) > 7, -jnp.inf, bias)


def shared(q_BLHK, distance_LS):
    return of_query(q_BLHK, distance_LS)[:1]


CASES = {
    "causal, values of another size": ({"V": 8}, CAUSAL, None),
    "a window": ({}, Mask(window=5), None),
    "documents and a window": ({"segments": True}, Mask(window=5), None),
    "not causal, a shared bias": ({}, EVERYTHING, shared),
    "documents and a bias of each query": ({"segments": True}, CAUSAL, of_query),
}


def run(segments, mask, bias, arrays):
    q, k, v, _ = arrays
    added = None if bias is None else bias(q, jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1]))
    return tokamax_attention(attention_cases.scaled(q, None)[0], k, v, None, segments, mask, bias=added)


def errors(name: str, dtype: str, **sizes) -> float:
    """The largest relative error, against `plain` in float32."""
    drawn, mask, bias = CASES[name]
    arrays, segments = draw(**drawn, **sizes, dtype=dtype)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    with jax.default_matmul_precision("highest"):
        expected = value_and_gradients(lambda arrays: plain(arrays, segments, mask, bias=bias), wide)
    return error(value_and_gradients(partial(run, segments, mask, bias), arrays), expected)


@installed
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_plain(name, monkeypatch):
    for implementation in ("xla", "xla_chunked"):
        monkeypatch.setattr(tokamax_kernels, "ATTENTION", (implementation,))
        assert errors(name, "float32", L=20) < TOLERANCE["float32"]


@installed
@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_plain_on_a_gpu(name):
    assert errors(name, "bfloat16", L=256, K=64) < TOLERANCE["bfloat16"]


def product_errors(dtype: str, T: int, D: int, F: int) -> list[float]:
    """Relative errors of the product and both of its gradients, against jax.lax.ragged_dot in float32."""
    rng = np.random.default_rng(0)
    sizes_E = jnp.asarray(rng.multinomial(T, (0.5, 0.0, 0.3, 0.2)), jnp.int32)
    x, w, dy = (jnp.asarray(rng.normal(size=s), dtype) for s in ((T, D), (4, D, F), (T, F)))
    wide = [a.astype(jnp.float32) for a in (x, w, dy)]
    with jax.default_matmul_precision("highest"):
        y, vjp = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes_E), *wide[:2])
        expected = y, *vjp(wide[2])
    y, vjp = jax.vjp(lambda x, w: tokamax_ragged_dot(x, w, sizes_E), x, w)
    return [relative_error(a, e) for a, e in zip((y, *vjp(dy)), expected, strict=True)]


@installed
def test_ragged_dot_equals_jax_s(monkeypatch):
    monkeypatch.setattr(tokamax_kernels, "PRODUCT", ("xla",))
    assert max(product_errors("float32", 40, 6, 5)) < TOLERANCE["float32"]


@installed
@on_gpu
def test_ragged_dot_equals_float32_on_a_gpu():
    """`auto` may choose it once this has passed: the gradient of the weights differed by 1.5e-2 from another kernel's."""
    assert max(product_errors("bfloat16", 4096, 1024, 1024)) < TOLERANCE["bfloat16"]


@installed
@pytest.mark.skipif("jax.default_backend() == 'gpu'", reason="it runs on a GPU")
def test_kernels_that_do_not_run_here_are_an_error_of_one_line():
    with pytest.raises(UserError, match="config.training.attention_kernel='tokamax' is not allowed here: .*cpu"):
        errors("a window", "float32", L=20)


def test_it_is_refused_with_the_reason(monkeypatch):
    assert refuse_tokamax("cpu", "float32") == "it needs a GPU, and the platform is cpu"
    assert "float64" in refuse_tokamax("gpu", "float64") and "8.0" in refuse_tokamax("gpu", "float32", (7, 5))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert 'pip install "xfresearch[gpu]"' in refuse_tokamax("gpu", "bfloat16")
