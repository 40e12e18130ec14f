"""Rematerialisation does not change gradients."""

import jax
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import VARIANTS, change, in_float64, random_params, tokens_for, tree_error
from tests.tolerances import TOLERANCE
from xfresearch.models import stack, transformer
from xfresearch.models.counting import count_flops


def gradients(config, layers, remat):
    def loss(params):
        logits, losses = forward(config, params, tokens_for(config), layers, remat, key=jax.random.key(1))
        return (logits**2).sum() + sum(value.sum() for value in losses.values())

    return jax.grad(loss)


@pytest.mark.parametrize("layers", ["scan", pytest.param("unroll", marks=pytest.mark.long)])
def test_gradients_are_equal_with_every_policy(layers, x64):
    config = in_float64(VARIANTS["pattern"])
    config = change(config, "blocks.dense.dropout", 0.2)  # recomputation draws the same masks
    params = random_params(config)
    expected = jax.jit(gradients(config, layers, "none"))(params)
    for remat in set(stack.REMAT) - {"none"}:
        assert tree_error(jax.jit(gradients(config, layers, remat))(params), expected) < TOLERANCE["float64"], remat


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_dots_and_full_recompute_matrix_products(layers):
    config = VARIANTS["base"]
    params = transformer.abstract(config)
    none, dots, full = (count_flops(gradients(config, layers, remat), params) for remat in ("none", "dots", "full"))
    assert none < dots < full
