"""Imports a folder sharded over meshes of 8 simulated devices, and exports it again. Run by test_importing.py.

Prints JSON {mesh: {equal: whether the parameters equal those on one device, held: the fraction of their bytes that one
device holds}}.
"""

import json
import sys

import jax
import numpy as np

import xfresearch as xf
from xfresearch.options.run_options import MeshConfig
from xfresearch.sharding.mesh import device_mesh, mesh_sizes

DEVICES = 8
MESHES = {"fsdp": MeshConfig(data=1, fsdp=8), "mixed": MeshConfig(data=2, fsdp=2, tensor=2)}


def result(folder: str, config: MeshConfig, out: str) -> dict:
    mesh = device_mesh(mesh_sizes(config, DEVICES), jax.devices(), config.between)
    single = xf.load(folder)
    sharded = xf.load(folder, mesh=mesh)
    equal = jax.tree.map(np.array_equal, jax.device_get(single.params), jax.device_get(sharded.params))
    sharded.export_hf(out)
    leaves = jax.tree.leaves(sharded.params)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)
    return {"equal": all(jax.tree.leaves(equal)), "held": held}


def main(folder: str, out: str) -> None:
    assert jax.device_count() == DEVICES
    print(json.dumps({name: result(folder, config, f"{out}/{name}") for name, config in MESHES.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
