"""The kept tokens of top-p equal those of a sort, in any vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xfresearch.kernels.top_p import LANES, kept_by_top_p

SIZES = (1, 2, LANES - 1, LANES, LANES + 1, 1000)


def kept_by_sorting(logits_V: np.ndarray, top_p: float) -> np.ndarray:
    """[V], from the definition: a token is kept if all that are likelier have less than top_p together."""
    p_V = np.exp(logits_V - logits_V.max())
    p_V /= p_V.sum()
    sorted_V = np.argsort(-logits_V, kind="stable")
    likelier_V = np.searchsorted(-logits_V[sorted_V], -logits_V, side="left")  # how many tokens are
    before_V = np.concatenate([[0], np.cumsum(p_V[sorted_V])])
    return (before_V[likelier_V] < top_p) | (likelier_V == 0)


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 100.0])
@pytest.mark.parametrize("size", SIZES)
def test_the_kept_tokens_are_those_of_a_sort(size, scale, x64):
    """Flat and sharp distributions, with ties and with excluded tokens."""
    rng = np.random.default_rng(size)
    logits_BV = np.round(scale * rng.standard_normal((6, size)), 2)  # 2 digits: with ties
    logits_BV[3:, : size // 3] = -np.inf
    for top_p in (1e-12, 0.1, 0.5, 0.9, 0.999):
        kept_BV = np.asarray(jax.jit(kept_by_top_p)(logits_BV, top_p))
        for row, (kept_V, logits_V) in enumerate(zip(kept_BV, logits_BV, strict=True)):
            np.testing.assert_array_equal(kept_V, kept_by_sorting(logits_V, top_p), f"row {row}, top_p={top_p}")


def test_in_float32_the_mass_differs_from_top_p_by_less_than_a_token():
    logits_BV = jnp.asarray(3 * np.random.default_rng(0).standard_normal((4, 30_000)), jnp.float32)
    kept_BV, p_BV = np.asarray(kept_by_top_p(logits_BV, 0.9)), np.asarray(jax.nn.softmax(logits_BV.astype(float), -1))
    for kept_V, p_V in zip(kept_BV, p_BV, strict=True):
        assert p_V[kept_V].min() >= p_V[~kept_V].max()
        assert p_V[kept_V].sum() >= 0.9 - 1e-6 and p_V[kept_V].sum() - p_V[kept_V].min() < 0.9 + 1e-6


def test_neighbours_among_the_numbers_are_told_apart():
    high = np.float32(1.25)
    logits_BV = jnp.array([[np.nextafter(high, np.float32(0)), high], [high, np.nextafter(high, np.float32(2))]])
    np.testing.assert_array_equal(kept_by_top_p(logits_BV, 0.4), [[False, True]] * 2)
