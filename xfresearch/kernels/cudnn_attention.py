"""Attention on NVIDIA GPUs with cuDNN's fused kernels.

cuDNN's causal mask is top-left: query l sees keys 0 to l of the keys that it is given. It would silently hide memory
slots among the keys from the first queries. Slots are therefore a second call, without a mask, merged with the call for
the tokens.
"""

from inspect import signature

import jax
import jax.numpy as jnp

from xfresearch.kernels.masks import EVERYTHING, Mask
from xfresearch.kernels.merged_attention import Part, folded, merged
from xfresearch.kernels.on_mesh import on_mesh


def cudnn(q_BLHK, k_BSGK, v_BSGK, memory, segments, mask: Mask, mesh=None):
    """o_BLHK for queries and keys at the same positions, from 0. q is already scaled; segments are not supported."""
    assert segments is None and not mask.nearest
    window = (mask.window - 1, 0) if mask.window else None
    settings = {"scale": 1.0, "is_causal": mask.causal, "local_window_size": window, "implementation": "cudnn"}

    def local(_, q, k, v, memory, segments):
        if memory is None:
            return jax.nn.dot_product_attention(q, k, v, **settings)
        parts = (cudnn_part(mask), folded(cudnn_part(EVERYTHING)))
        slots = (memory.key[None], memory.value[None])
        return merged(parts, (q, memory.queries(q)), ((k, v), slots), (None, None))

    # With shard_map: JAX's own partitioning refuses a replicated single key-value head next to sharded query heads.
    return on_mesh(local, mesh, q_BLHK, k_BSGK, v_BSGK, memory, None, keys="S")


def cudnn_part(mask: Mask) -> Part:
    """A part of a merged softmax, without constants. q is already scaled."""
    # Private functions: the public ones return lse in q's dtype, and their backward pass accepts no lse.
    from jax._src.cudnn import fused_attention_stablehlo as sdpa

    settings = {
        "scale": 1.0,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, no gradient of a bias
        "mask_type": sdpa.MaskType.CAUSAL if mask.causal else sdpa.MaskType.NO_MASK,
        "layout": sdpa.AttentionLayout.BTNH.value,
        "sliding_window_length": mask.window or None,
    }
    if "score_mod" in signature(sdpa._dot_product_attention_fwd_impl).parameters:  # since jax 0.12
        settings |= {"score_mod": None, "score_mod_args": ()}

    def inputs(q_BLHK, k, v):
        return (q_BLHK, k, v, *[jnp.zeros(0, q_BLHK.dtype)] * 7)  # empty: bias, lengths, offsets, pages

    def forward(q_BLHK, k, v, constants):
        return sdpa._dot_product_attention_fwd_impl(*inputs(q_BLHK, k, v), **settings, is_training=True)

    def backward(q_BLHK, k, v, constants, o_BLHV, lse_BHL, do_BLHV):
        return sdpa._dot_product_attention_bwd_impl(*inputs(q_BLHK, k, v), lse_BHL, o_BLHV, do_BLHV, **settings)

    return Part(forward, backward)
