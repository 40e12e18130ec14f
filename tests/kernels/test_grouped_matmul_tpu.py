"""A dropless layer of experts, compiled for a TPU without one: it computes the chosen experts and nothing else.

Needs libtpu (`pip install libtpu`), in a process of its own: a library of devices cannot be loaded beside another's.
"""

import json
import os
import re
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


def mesh_of(devices, **sizes):
    import numpy as np
    from jax.sharding import AxisType, Mesh

    axes = ("data", "fsdp", "expert", "tensor", "context")
    shape = [sizes.get(axis, 1) for axis in axes]
    return Mesh(np.array(devices).reshape(shape), axes, axis_types=(AxisType.Auto,) * 5)


def compiled() -> dict[str, float]:
    """FLOPs of the layer on one chip forward, and with its gradient, as the compiler counts them (a kernel by what it says
    of itself); and in closed form, forward. Ragged all-to-alls and kernel calls of both passes with experts over four."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from xfresearch.config import BlockConfig, FeedForwardConfig, ModelConfig, MoeConfig
    from xfresearch.models.context import Context
    from xfresearch.models.moe import MixtureOfExperts

    moe = MoeConfig(experts=EXPERTS, top_k=TOP_K)
    block = BlockConfig(feed_forward=FeedForwardConfig(kind="moe", hidden=HIDDEN, moe=moe))
    model = ModelConfig(width=WIDTH, dtype="bfloat16", blocks={"main": block})
    layer = nnx.eval_shape(lambda: MixtureOfExperts(model, block, nnx.Rngs(params=jax.random.key(0))))

    def forward(layer, x_BLD, mesh):
        return layer(x_BLD, Context(positions_BL=None, mesh=mesh))

    def loss(layer, x_BLD, mesh):
        y_BLD, _, aux = forward(layer, x_BLD, mesh)
        return y_BLD.astype(jnp.float32).sum() + sum(value.sum() for value in aux.losses.values())

    def program(function, mesh):
        at = NamedSharding(mesh, PartitionSpec())
        inputs = (layer, jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.bfloat16))
        inputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), inputs)
        return jax.jit(function, static_argnums=2).lower(*inputs, mesh).compile()

    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIP).devices
    one, both = mesh_of(devices[:1]), jax.grad(loss, (0, 1), allow_int=True)
    cut = program(both, mesh_of(devices, expert=4)).as_text()
    return {
        "costs": MixtureOfExperts.costs(model, block, LENGTH).flops_per_token * BATCH * LENGTH,
        "forward": program(lambda *inputs: forward(*inputs)[0], one).cost_analysis()["flops"],
        "both": program(both, one).cost_analysis()["flops"],
        "exchanges": len(re.findall(r" ragged-all-to-all(?:-start)?\(", cut)),
        "calls": cut.count('custom_call_target="tpu_custom_call"'),
    }


@pytest.fixture(scope="module")
def program() -> dict[str, float]:
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: nothing here compiles for a TPU")
    command = [sys.executable, "-m", "tests.kernels.test_grouped_matmul_tpu"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | TOPOLOGY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_forward_costs_the_active_experts_and_the_router(program):
    assert 0.99 * program["costs"] <= program["forward"] <= 1.05 * program["costs"]


def test_the_gradient_costs_twice_as_much_again(program):
    assert 2.9 * program["costs"] <= program["both"] <= 1.05 * 3 * program["costs"]


def test_experts_over_devices_get_rows_and_no_more(program):
    """Rows there and back, in both passes; three products, each with two gradients."""
    assert program["exchanges"] == 4 and program["calls"] == 9


if __name__ == "__main__":
    print(json.dumps(compiled()))
