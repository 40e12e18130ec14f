"""A dropless layer of experts, compiled for a TPU without one: it computes the chosen experts and nothing else.

Needs libtpu (`pip install libtpu`), in a process of its own: a library of devices cannot be loaded beside another's.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOPOLOGY = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
CHIP = "v5e:2x2"
BATCH, LENGTH, WIDTH, HIDDEN, EXPERTS, TOP_K = 4, 512, 512, 512, 8, 2


def compiled_flops() -> dict[str, float]:
    """FLOPs of the layer forward, and with its gradient, as the compiler counts them; and in closed form, forward."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from xfresearch.config import BlockConfig, FeedForwardConfig, ModelConfig, MoeConfig
    from xfresearch.models.context import Context
    from xfresearch.models.moe import MixtureOfExperts

    moe = MoeConfig(experts=EXPERTS, top_k=TOP_K, kernel="ragged")  # what 'auto' is on a TPU
    block = BlockConfig(feed_forward=FeedForwardConfig(kind="moe", hidden=HIDDEN, moe=moe))
    model = ModelConfig(width=WIDTH, dtype="bfloat16", blocks={"main": block})
    layer = nnx.eval_shape(lambda: MixtureOfExperts(model, block, nnx.Rngs(params=jax.random.key(0))))

    def loss(layer, x_BLD):
        y_BLD, _, aux = layer(x_BLD, Context(positions_BL=None))
        return y_BLD.astype(jnp.float32).sum() + sum(value.sum() for value in aux.losses.values())

    at = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=CHIP).devices[0])
    inputs = (layer, jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16))
    inputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), inputs)
    costs = MixtureOfExperts.costs(model, block, LENGTH).flops_per_token * BATCH * LENGTH
    forward = jax.jit(lambda layer, x_BLD: layer(x_BLD, Context(positions_BL=None))[0])
    both = jax.jit(jax.grad(loss, (0, 1), allow_int=True))
    counted = {name: f.lower(*inputs).compile().cost_analysis() for name, f in (("forward", forward), ("both", both))}
    return {"costs": costs, **{name: analysis["flops"] for name, analysis in counted.items()}}


@pytest.fixture(scope="module")
def flops() -> dict[str, float]:
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: nothing here compiles for a TPU")
    command = [sys.executable, "-m", "tests.kernels.test_grouped_matmul_tpu"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | TOPOLOGY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_forward_costs_the_active_experts_and_the_router(flops):
    assert 0.99 * flops["costs"] <= flops["forward"] <= 1.05 * flops["costs"]


def test_the_gradient_costs_twice_as_much_again(flops):
    assert 2.9 * flops["costs"] <= flops["both"] <= 1.05 * 3 * flops["costs"]


if __name__ == "__main__":
    print(json.dumps(compiled_flops()))
