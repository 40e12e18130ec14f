"""Embedding lookup, x_BLD = table_RD[ids_BL], with the tokens and the table sharded over a mesh.

The table's width is sharded over `fsdp`, and a vocabulary also over `tensor`. Each device gathers the width and looks
up the ids in its shard of the vocabulary; the results are summed over `tensor`. The gradient takes the same path back:
each device sums the rows of its own tokens, then a reduce-scatter sums them over devices and scatters them in one step.
"""

import jax
import jax.numpy as jnp

from xfresearch.sharding.partition import activation_spec, parameter_spec


def lookup(table_RD, letters: str, ids_BL, mesh=None):
    """x_BLD in the table's dtype. letters: of the table's dimensions (sharding/letters.py), VD or LD."""
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
