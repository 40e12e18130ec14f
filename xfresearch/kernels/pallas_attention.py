"""Attention on NVIDIA GPUs by the Pallas kernel that comes with JAX (for Triton): causal or not, with packed documents.

JAX 0.11 and later call it deprecated, in favour of a package that is not required here; its Mosaic successor in JAX has no
causal backward pass. So it serves where it is asked for by name. Memory slots are a part of their own, in plain JAX.
"""

import math
import warnings

import jax.numpy as jnp

from xfresearch.kernels.chunked_attention import with_memory
from xfresearch.kernels.merged_attention import Part
from xfresearch.kernels.on_mesh import on_mesh
from xfresearch.kernels.sight import Sight

INTERPRET = False  # tests have the kernels interpreted, on CPU


def pallas(q_BLHK, k_BSGK, v_BSGK, memory, segments, sight: Sight, mesh=None):
    """o_BLHK of tokens at the same positions, from 0; q comes scaled. segments: of queries and of keys, the same ones."""

    def local(_, q, k, v, memory, segments):
        return with_memory((pallas_part(sight.causal), (k, v), segments and segments[0]), q, memory)

    return on_mesh(local, mesh, q_BLHK, k_BSGK, v_BSGK, memory, segments, keys="S")


def pallas_part(causal: bool) -> Part:
    """A part of a merged softmax; its constants are the segments, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as kernels

    sizes = kernels.BlockSizes.get_default()
    settings = {"sm_scale": 1.0, "causal": causal, "block_sizes": sizes, "backward_pass_impl": "triton"}
    settings |= {"num_warps": None, "num_stages": 2, "grid": None, "interpret": INTERPRET, "debug": False}

    def repeat(x_BSGK, heads: int):
        return jnp.repeat(x_BSGK, heads // x_BSGK.shape[2], 2)  # the kernel has as many key-value heads as queries have

    def forward(q_BLHK, k, v, segments):
        H = q_BLHK.shape[2]
        o, log2_BHL = kernels.mha(q_BLHK, repeat(k, H), repeat(v, H), segments, **settings, return_residuals=True)
        return o, log2_BHL * math.log(2)

    def backward(q_BLHK, k, v, segments, o_BLHV, lse_BHL, do_BLHV):
        H, G = q_BLHK.shape[2], k.shape[2]
        residuals = (q_BLHK, repeat(k, H), repeat(v, H), segments, o_BLHV, lse_BHL / math.log(2))
        # Private: the public kernel offers no gradient for an lse that is not its own.
        dq, *rest, _ = kernels._mha_backward(**settings, return_residuals=False, res=residuals, do=do_BLHV)
        return dq, *(d.reshape(*d.shape[:2], G, H // G, -1).sum(3) for d in rest)

    return Part(forward, backward)
