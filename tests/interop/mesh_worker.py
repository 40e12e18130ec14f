"""Run by test_importing.py with 8 simulated devices, on a folder: imports it onto meshes and exports it again.

Prints JSON {mesh: {equal: whether parameters are those of one device, held: a device's share of their bytes}}.
"""

import json
import sys

import jax
import numpy as np

import xfresearch as xf
from xfresearch.config.run import MeshConfig
from xfresearch.sharding.mesh import device_mesh, mesh_sizes

DEVICES = 8
MESHES = {"fsdp": MeshConfig(data=1, fsdp=8), "mixed": MeshConfig(data=2, fsdp=2, tensor=2)}


def result(folder: str, config: MeshConfig, out: str) -> dict:
    mesh = device_mesh(mesh_sizes(config, DEVICES), jax.devices(), config.between)
    one, cut = xf.load(folder), xf.load(folder, mesh=mesh)
    equal = jax.tree.map(np.array_equal, jax.device_get(one.params), jax.device_get(cut.params))
    cut.export_hf(out)
    leaves = jax.tree.leaves(cut.params)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)
    return {"equal": all(jax.tree.leaves(equal)), "held": held}


def main(folder: str, out: str) -> None:
    assert jax.device_count() == DEVICES
    print(json.dumps({name: result(folder, config, f"{out}/{name}") for name, config in MESHES.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
