"""Rows of a table by id, x_BLD = table_RD[ids_BL], where tokens are cut over devices and so is the table.

A device has a part of the width along `fsdp`, and of a vocabulary a part along `tensor`. It gathers the width, looks its own
ids up, and what the parts of the vocabulary found is added up. The gradient goes the same way back: each device adds up the
rows of its own tokens, then the whole is summed over devices and scattered in one step.
"""

import jax
import jax.numpy as jnp

from xfresearch.sharding.partition import activation_spec, parameter_spec


def lookup(table_RD, letters: str, ids_BL, mesh=None):
    """x_BLD in the table's dtype; `letters` are the table's dimensions in models/axes.py, VD or LD."""
    if mesh is None:
        return table_RD[ids_BL]
    table = parameter_spec(mesh, letters, table_RD.shape, "of an embedding")

    def local(table_RD, ids_BL):
        table_RD = jax.lax.all_gather(table_RD, "fsdp", axis=1, tiled=True) if mesh.shape["fsdp"] > 1 else table_RD
        if table[0] is None or mesh.shape["tensor"] == 1:
            return table_RD[ids_BL]
        rows = table_RD.shape[0]
        ids_BL = ids_BL - rows * jax.lax.axis_index("tensor")
        own_BL1 = ((ids_BL >= 0) & (ids_BL < rows))[..., None]
        return jax.lax.psum(jnp.where(own_BL1, table_RD[ids_BL.clip(0, rows - 1)], 0), "tensor")

    tokens = activation_spec(mesh, "BL", ids_BL.shape)
    return jax.shard_map(local, mesh=mesh, in_specs=(table, tokens), out_specs=tokens, check_vma=False)(
        table_RD, ids_BL
    )
