"""Compares variants, sharded and scanned, with one device, unrolled, in float64. Prints JSON {variant: error}.

test_sharded.py runs it with simulated devices and the names of the variants. The error is the largest relative error of
the logits, of every tap's value in a pass in which a patch changes the last layer, and of the gradients where they are
computed.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from tests.contracts.meshes import mesh_sizes
from tests.contracts.passes import capture, forward
from tests.contracts.two_stacks import MODELS
from tests.contracts.variants import ALL, KEPT, in_float64, random_params, tokens_for, tree_error
from tests.tolerances import relative_error
from xfresearch.models import transformer
from xfresearch.models.context import Execution
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.taps import Patch
from xfresearch.sharding.partition import batch_sharding, param_shardings

DEVICES = 8
# Variants whose gradients are compared, which take three times as long to compile. They have every kind of sublayer.
GRADIENTS = ["pattern", "pattern-repeated", *KEPT, "two stacks: pre-norm", "two stacks: experts"]
TESTED = ALL | {f"two stacks: {name}": config for name, config in MODELS.items()}


def logits_and_gradients(config, gradients: bool, mesh=None):
    def loss(params, tokens_BL, layers):
        logits, losses = forward(config, params, tokens_BL, layers, mesh=mesh, execution=Execution())
        weights_BLV = np.random.default_rng(3).standard_normal(logits.shape)
        return (weights_BLV * logits).sum() + sum(value.sum() for value in losses.values()), logits

    return jax.grad(loss, has_aux=True) if gradients else lambda *inputs: ({}, loss(*inputs)[1])


def tapped(config, mesh=None):
    names = [name for name, value in tap_shapes(config).items() if jnp.issubdtype(value.dtype, jnp.floating)]
    last = f"blocks.{config.depth - 1}."
    half = {name: Patch(lambda x: x / 2) for name in names if name.startswith(last) and name.endswith(".raw")}
    context = {"mesh": mesh, "execution": Execution(), "replace": half}

    def values(params, tokens_BL, layers) -> list:
        return capture(config, params, tokens_BL, names, layers=layers, **context)

    return values


def error(config, gradients: bool) -> float:
    config = in_float64(config)
    params = random_params(config)
    tokens_BL = tokens_for(config, batch=DEVICES)
    run = logits_and_gradients(config, gradients)
    expected_gradients, expected_logits = run(params, tokens_BL, "unroll")
    sizes = mesh_sizes(config, DEVICES)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    shardings = param_shardings(mesh, params, transformer.axes(config))
    placed = jax.device_put(params, shardings)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed))
    run = logits_and_gradients(config, gradients, mesh)
    step = jax.jit(run, static_argnums=2, out_shardings=(shardings if gradients else None, None))
    actual_gradients, actual_logits = step(placed, jax.device_put(tokens_BL, batch_sharding(mesh)), "scan")
    errors = [relative_error(actual_logits, expected_logits)]
    step = jax.jit(tapped(config, mesh), static_argnums=2)
    values = step(placed, jax.device_put(tokens_BL, batch_sharding(mesh)), "scan")
    expected = tapped(config)(params, tokens_BL, "unroll")
    errors += [relative_error(value, each) for value, each in zip(values, expected, strict=True)]
    if gradients:
        errors.append(tree_error(jax.device_get(actual_gradients), expected_gradients))
    return max(errors)


def main() -> None:
    assert jax.device_count() == DEVICES
    with jax.enable_x64(True):
        print(json.dumps({name: error(TESTED[name], name in GRADIENTS) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
