"""A dropless layer of experts, compiled without a TPU: it computes only the chosen experts.

Needs libtpu (`make libtpu`).
"""

import json
import re

import pytest

from tests.kernels.on_tpu import compiled_by, mesh_of

CHIP = "v5e:2x2"
BATCH, LENGTH, WIDTH, HIDDEN, EXPERTS, TOP_K = 4, 512, 512, 512, 8, 2


def compiled() -> dict[str, float]:
    """FLOPs of the layer on one chip by the compiler, forward and with gradient, and by the closed form, forward.

    The compiler counts a kernel by the cost that the kernel declares. `exchanges` and `calls` are the ragged
    all-to-alls and kernel calls of both passes, with experts sharded over four chips.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from tests.blocks import block
    from xfresearch.models.context import Context
    from xfresearch.models.feed_forwards.moe import MixtureOfExperts
    from xfresearch.models.model_config import ModelConfig

    sparse = block(feed_forward={"kind": "moe", "hidden": HIDDEN, "moe": {"experts": EXPERTS, "top_k": TOP_K}})
    model = ModelConfig(width=WIDTH, dtype="bfloat16", blocks={"main": sparse})
    place = next(place for _, sublayer, place in model.places() if sublayer.name == "feed_forward")
    layer = nnx.eval_shape(lambda: MixtureOfExperts(place, nnx.Rngs(params=jax.random.key(0))))

    def forward(layer, x_BLD, mesh):
        return layer(x_BLD, Context(positions_BL=None, mesh=mesh))

    def loss(layer, x_BLD, mesh):
        y_BLD, _, aux = forward(layer, x_BLD, mesh)
        return y_BLD.astype(jnp.float32).sum() + sum(value.sum() for value in aux.losses.values())

    def program(function, mesh):
        replicated = NamedSharding(mesh, PartitionSpec())
        inputs = (layer, jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16))
        inputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), inputs)
        return jax.jit(function, static_argnums=2).lower(*inputs, mesh).compile()

    one_chip = mesh_of(CHIP, 1)
    both = jax.grad(loss, (0, 1), allow_int=True)
    sharded = program(both, mesh_of(CHIP, expert=4)).as_text()
    return {
        "costs": MixtureOfExperts.costs(place, LENGTH).flops_per_token * BATCH * LENGTH,
        "forward": program(lambda *inputs: forward(*inputs)[0], one_chip).cost_analysis()["flops"],
        "both": program(both, one_chip).cost_analysis()["flops"],
        "exchanges": len(re.findall(r" ragged-all-to-all(?:-start)?\(", sharded)),
        "calls": sharded.count('custom_call_target="tpu_custom_call"'),
    }


@pytest.fixture(scope="module")
def program() -> dict[str, float]:
    return compiled_by("tests.kernels.test_grouped_matmul_tpu")


def test_the_forward_pass_costs_the_active_experts_and_the_router(program):
    assert 0.99 * program["costs"] <= program["forward"] <= 1.05 * program["costs"]


def test_the_gradient_costs_twice_the_forward_pass(program):
    assert 2.9 * program["costs"] <= program["both"] <= 1.05 * 3 * program["costs"]


def test_sharded_experts_exchange_only_their_rows(program):
    """Rows to the experts and back, in both passes. Three products, each with two gradients."""
    assert program["exchanges"] == 4 and program["calls"] == 9


if __name__ == "__main__":
    print(json.dumps(compiled()))
