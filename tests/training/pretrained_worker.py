"""test_pretrained.py runs this with simulated devices. Prints {equal: whether the parameters that a run starts from are
those of one device, read, held: the fractions of their bytes that one device holds while they are read, and at the end}."""

import json
import sys

import jax
import numpy as np

from xfresearch.checkpoints import store
from xfresearch.sharding.mesh import make_mesh
from xfresearch.training import pretrained

ONE = ["--config.mesh.data=4"]
SHARDED = ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"]


def fraction(params) -> float:
    """The fraction of the bytes of (abstract) arrays that one device holds."""
    leaves = jax.tree.leaves(params)
    return sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves) / sum(leaf.size for leaf in leaves)


def main(arguments: list[str]) -> None:
    collected = {}
    read = []
    restore = store.restore_params

    def watched(workdir, step, abstract):
        read.append(fraction(abstract))
        return restore(workdir, step, abstract)

    store.restore_params = watched
    for mesh in (ONE, SHARDED):
        config = pretrained.parse([*arguments, *mesh])
        collected[mesh[0]] = pretrained.load(config, make_mesh(config))[0]
    single, sharded = collected.values()
    equal = jax.tree.map(np.array_equal, jax.device_get(single), jax.device_get(sharded))
    print(json.dumps({"equal": all(jax.tree.leaves(equal)), "read": read[-1], "held": fraction(sharded)}))


if __name__ == "__main__":
    main(sys.argv[1:])
