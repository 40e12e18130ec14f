"""Contract 1: the forward pass and its gradient lower for TPU on an abstract mesh of 64 devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from tests.contracts.meshes import mesh_sizes
from tests.contracts.passes import forward
from tests.contracts.two_stacks import MODELS
from tests.contracts.variants import ALL, DISTINCT, marked
from tests.daily import daily
from xfresearch.models import transformer
from xfresearch.models.context import Execution
from xfresearch.sharding.partition import batch_sharding, param_shardings

DEVICES = 64


def abstract_mesh(config):
    sizes = mesh_sizes(config, DEVICES)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def loss(config, params, tokens_BL, mesh):
    logits, losses = forward(config, params, tokens_BL, layers="scan", mesh=mesh, execution=Execution())
    return jax.nn.logsumexp(logits, -1).mean() + sum(value.sum() for value in losses.values())


# Layouts, positions, norms, activations, identities and patterns call the same sublayers, whose parameters have the same
# axes.
ALIKE = ("configs/", "norm", "layout=", "attention.position=", "attention.query=", "attention.key=", "attention.value=")
ALIKE += ("attention.shaping=", "attention.output_gate=head", "attention.memory_activation", "attention[slots]", "segments")
ALIKE += ("attention.qk_norm=", "feed_forward.kind=glu", "feed_forward.bias", "feed_forward[moe].moe.shared", "pattern-")
DEFAULT_RUN = ["layout=resi_dual", "attention.query=merged", "configs/mixtral_8x7b.py"]
DEFAULT_RUN += [name for name in DISTINCT if not name.startswith(ALIKE)]


def check(config) -> None:
    mesh = abstract_mesh(config)
    assert mesh.size == DEVICES
    params = transformer.abstract(config)
    shardings = param_shardings(mesh, params, transformer.axes(config))
    placed = jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, shardings)
    tokens_BL = jax.ShapeDtypeStruct((DEVICES, 8), jnp.int32, sharding=batch_sharding(mesh))
    for sharding, leaf in zip(jax.tree.leaves(shardings), jax.tree.leaves(params), strict=True):
        sharding.shard_shape(leaf.shape)
    step = jax.jit(
        lambda params, tokens_BL: jax.grad(lambda p: loss(config, p, tokens_BL, mesh))(params), out_shardings=shardings
    )
    traced = step.trace(placed, tokens_BL)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), traced.out_info) == jax.tree.map(
        lambda x: (x.shape, x.dtype), params
    )
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert f"num_partitions = {DEVICES}" in text


@pytest.mark.parametrize("name", marked(DEFAULT_RUN))
def test_lowers_on_64_devices(name):
    check(ALL[name])


@pytest.mark.parametrize("name", daily(["merged"], MODELS))  # an encoder of another width
def test_two_stacks_lower_on_64_devices(name):
    check(MODELS[name])


def test_every_mesh_axis_is_used_by_some_variant():
    sizes = [mesh_sizes(config, DEVICES) for config in ALL.values()]
    assert all(max(size[axis] for size in sizes) > 1 for axis in ("data", "fsdp", "expert", "tensor", "context"))
