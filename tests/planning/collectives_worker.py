"""Compiles small programs with known collectives for 8 simulated devices, and prints their HLO texts as JSON."""

import json

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
TRIPS = 5


def text(fn, *arguments) -> str:
    return jax.jit(fn).lower(*arguments).compile().as_text()


def array(shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))


def on_devices(fn, in_specs, out_specs):
    return jax.shard_map(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def repeated(fn):
    """A scan that applies fn TRIPS times."""
    return lambda x: jax.lax.scan(lambda carry, _: (fn(carry), None), x, None, length=TRIPS)[0]


def exchange(x):
    return jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True)


def once_each(x):
    """One collective of each kind over one axis, and an all-reduce over both."""
    gathered = jax.lax.all_gather(x, "tensor", tiled=True)
    scattered = jax.lax.psum_scatter(gathered, "fsdp", tiled=True)
    swapped = jax.lax.ppermute(scattered, "fsdp", [(i, (i + 1) % 4) for i in range(4)])
    return jax.lax.psum(swapped.sum(), ("fsdp", "tensor"))


def main() -> None:
    programs = {
        "weights": text(lambda x, w: x @ w, array((64, 128), P("fsdp")), array((128, 32), P("fsdp"))),
        "loop": text(
            on_devices(repeated(lambda x: jnp.cos(jax.lax.psum(x, "tensor"))), P("fsdp"), P("fsdp")),
            array((32, 16), P("fsdp")),
        ),
        "nested": text(
            on_devices(repeated(repeated(lambda x: exchange(jnp.sin(x)).reshape(x.shape))), P("fsdp"), P("fsdp")),
            array((64, 8), P("fsdp")),
        ),
        "once_each": text(on_devices(once_each, P("fsdp"), P()), array((64, 8), P("fsdp"))),
        "none": text(lambda x: x * 2, array((64, 8), P("fsdp"))),
    }
    print(json.dumps(programs))


main()
