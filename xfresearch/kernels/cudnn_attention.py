"""Attention on NVIDIA GPUs by cuDNN's fused kernels.

Its causal mask is top-left: query l sees keys 0 to l of whatever it is given, so that memory slots among its keys would be
hidden from the first queries, silently. Slots are therefore a second call, without a mask, merged with that of the tokens.
"""

from inspect import signature

import jax
import jax.numpy as jnp

from xfresearch.kernels.masks import EVERYTHING, Mask
from xfresearch.kernels.merged_attention import Part, folded, merged
from xfresearch.kernels.on_mesh import on_mesh


def cudnn(q_BLHK, k_BSGK, v_BSGK, memory, segments, mask: Mask, mesh=None):
    """o_BLHK of tokens at the same positions, from 0; q comes scaled. It has no segments."""
    assert segments is None and not mask.nearest
    window = (mask.window - 1, 0) if mask.window else None
    settings = {"scale": 1.0, "is_causal": mask.causal, "local_window_size": window, "implementation": "cudnn"}

    def local(_, q, k, v, memory, segments):
        if memory is None:
            return jax.nn.dot_product_attention(q, k, v, **settings)
        parts, slots = (cudnn_part(mask), folded(cudnn_part(EVERYTHING))), (memory.key[None], memory.value[None])
        return merged(parts, (q, memory.met_by(q)), ((k, v), slots), (None, None))

    # By hand: JAX's own way to cut it refuses one key-value head, which all devices have, beside queries of theirs alone.
    return on_mesh(local, mesh, q_BLHK, k_BSGK, v_BSGK, memory, None, keys="S")


def cudnn_part(mask: Mask) -> Part:
    """A part of a merged softmax, without constants; q comes scaled."""
    # Private: the public functions return lse in the dtype of q, and take no lse to differentiate with.
    from jax._src.cudnn import fused_attention_stablehlo as sdpa

    settings = {
        "scale": 1.0,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, no gradient of one
        "mask_type": sdpa.MaskType.CAUSAL if mask.causal else sdpa.MaskType.NO_MASK,
        "layout": sdpa.AttentionLayout.BTNH.value,
        "sliding_window_length": mask.window or None,
    }
    if "score_mod" in signature(sdpa._dot_product_attention_fwd_impl).parameters:  # from jax 0.12 on
        settings |= {"score_mod": None, "score_mod_args": ()}

    def inputs(q_BLHK, k, v):
        return (q_BLHK, k, v, *[jnp.zeros(0, q_BLHK.dtype)] * 7)  # no bias, lengths, offsets and pages

    def forward(q_BLHK, k, v, constants):
        return sdpa._dot_product_attention_fwd_impl(*inputs(q_BLHK, k, v), **settings, is_training=True)

    def backward(q_BLHK, k, v, constants, o_BLHV, lse_BHL, do_BLHV):
        return sdpa._dot_product_attention_bwd_impl(*inputs(q_BLHK, k, v), lse_BHL, o_BLHV, do_BLHV, **settings)

    return Part(forward, backward)
