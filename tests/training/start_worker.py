"""test_start.py runs this with simulated devices. Prints {equal: whether the parameters that a run starts from are those of
one device, held: the fraction of their bytes that one device holds}."""

import json
import sys

import jax
import numpy as np

from xfresearch.sharding.mesh import make_mesh
from xfresearch.training import start

ONE = ["--config.mesh.data=4"]
SHARDED = ["--config.mesh.fsdp=2", "--config.mesh.tensor=2"]


def main(arguments: list[str]) -> None:
    found = {}
    for mesh in (ONE, SHARDED):
        config = start.parse([*arguments, *mesh])
        found[mesh[0]] = start.load(config, make_mesh(config))[0]
    single, sharded = found.values()
    leaves = jax.tree.leaves(sharded)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)
    equal = jax.tree.map(np.array_equal, jax.device_get(single), jax.device_get(sharded))
    print(json.dumps({"equal": all(jax.tree.leaves(equal)), "held": held}))


if __name__ == "__main__":
    main(sys.argv[1:])
