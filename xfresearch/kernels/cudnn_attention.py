"""Attention on NVIDIA GPUs with cuDNN's fused kernels.

cuDNN's causal mask is top-left: query l sees keys 0 to l of the keys that it is given. It would silently hide memory
slots among the keys from the first queries. Slots are therefore a second call, without a mask, merged with the call for
the tokens. A sink needs no call.

Biases, and masks of packed documents, are one array [1 or B, 1 or H, L, L] that cuDNN adds to the logits. No gradient of a
mask is computed. The gradient of a bias is known to be right only if all sequences share the bias (jax#30593). So if each
sequence has its own bias, all sequences become heads of a single sequence.
"""

from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp

from xfresearch.kernels.masks import EVERYTHING, Mask, Slots, visible
from xfresearch.kernels.merged_attention import Part, folded, sink_part, with_slots
from xfresearch.kernels.on_mesh import on_mesh, padded
from xfresearch.sharding.partition import activation_spec

MULTIPLE = 8  # of the size of a head


def cudnn(q_BLHK, k_BSGK, v_BSGV, memory, segments, mask: Mask, mesh=None, bias=None):
    """o_BLHV for queries and keys at the same positions, from 0. q is already scaled.

    segments: (of queries, of keys) or None. bias: added to the logits of tokens, [1 or B, H, L, S]; -inf hides a key.
    """
    V = v_BSGV.shape[-1]
    size = padded(max(q_BLHK.shape[-1], V), MULTIPLE)  # zeros change no logit, and their outputs are left out
    q, k, v = (_widened(x, size) for x in (q_BLHK, k_BSGK, v_BSGV))
    if memory is not None:
        query = None if memory.query is None else _widened(memory.query, size)
        memory = Slots(query, _widened(memory.key, size), _widened(memory.value, size), memory.sink_H)

    def local(bias, q, k, v, memory, segments):
        if memory is None and segments is None and bias is None:
            window = (mask.window - 1, 0) if mask.window else None
            settings: dict = {"scale": 1.0, "is_causal": mask.causal, "local_window_size": window}
            return jax.nn.dot_product_attention(q, k, v, **settings, implementation="cudnn")
        return with_slots(_tokens(q, k, v, segments, mask, bias), q, memory, memory and _slots(memory))

    spec = None
    if mesh is not None and bias is not None:
        spec = activation_spec(mesh, "NHLS" if bias.shape[0] == 1 else "BHLS", bias.shape)
    # With shard_map: JAX's own partitioning refuses a replicated single key-value head next to sharded query heads.
    o = on_mesh(local, mesh, q, k, v, memory, segments, keys="S", extra=bias, extra_spec=spec)
    return o[..., :V]


def _widened(x, size: int):
    """x with zeros at the end of its last dimension."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, size - x.shape[-1]),)) if x.shape[-1] < size else x


def _tokens(q_BLHK, k, v, segments, mask: Mask, bias):
    """Attention to tokens: (part, its keys and values, with the bias as the last, its constants)."""
    if segments is None and bias is None:
        return cudnn_part(mask), (k, v), None
    lowest = -(2.0**15) if q_BLHK.dtype == jnp.float16 else -(2.0**41)  # as in JAX: cuDNN subtracts two of them
    L, S = q_BLHK.shape[1], k.shape[1]
    whole = Mask(mask.causal)  # the window is in the array: whether cuDNN combines the two is not documented
    seen_BLS = visible(jnp.arange(L)[:, None] - jnp.arange(S), mask, segments)
    if bias is None:
        hidden_B1LS = jnp.where(seen_BLS, 0, lowest).astype(q_BLHK.dtype)[:, None]
        return cudnn_part(whole), (k, v), hidden_B1LS
    bias = jnp.maximum(bias, lowest)
    if seen_BLS is not None:
        bias = jnp.where(seen_BLS[:, None], bias, lowest)
    part = cudnn_part(whole)
    return part if len(bias) == 1 else sequences_as_heads(part), (k, v, bias.astype(q_BLHK.dtype)), None


def _slots(memory: Slots):
    """Attention to the slots: (part, its keys and values, its constants)."""
    if memory.sink_H is not None:
        return sink_part(), (memory.sink_H,), None
    return folded(cudnn_part(EVERYTHING)), (memory.key[None], memory.value[None]), None


def cudnn_part(mask: Mask) -> Part:
    """A part of a merged softmax. q is already scaled.

    Its keys and values are (k, v), or (k, v, bias) if the bias needs a gradient. Its constant is a bias that needs none, or
    None.
    """
    # Private functions: the public ones return lse in q's dtype, and their backward pass accepts no lse.
    from jax._src.cudnn import fused_attention_stablehlo

    sdpa: Any = fused_attention_stablehlo  # mypy does not count arrays that come in a tuple
    settings: dict = {
        "scale": 1.0,
        "seed": 0,
        "dropout_rate": 0.0,
        "mask_type": sdpa.MaskType.CAUSAL if mask.causal else sdpa.MaskType.NO_MASK,
        "layout": sdpa.AttentionLayout.BTNH.value,
        "sliding_window_length": mask.window or None,
    }
    if "score_mod" in signature(sdpa._dot_product_attention_fwd_impl).parameters:  # since jax 0.12
        settings |= {"score_mod": None, "score_mod_args": ()}

    def inputs(q_BLHK, k, v, trained: tuple, constant):
        """The arrays, and the settings that depend on them."""
        empty = jnp.zeros(0, q_BLHK.dtype)  # in place of arrays that are not used: bias, lengths, offsets, pages
        bias = trained[0] if trained else constant
        arrays = (q_BLHK, k, v, empty if bias is None else bias, *[empty] * 6)
        return arrays, settings | {"variadic_args": (bias is not None, bool(trained))}

    def forward(q_BLHK, k, v, *rest):
        arrays, named = inputs(q_BLHK, k, v, rest[:-1], rest[-1])
        return sdpa._dot_product_attention_fwd_impl(*arrays, **named, is_training=True)

    def backward(q_BLHK, k, v, *rest):
        *trained, constant, o_BLHV, lse_BHL, do_BLHV = rest
        arrays, named = inputs(q_BLHK, k, v, tuple(trained), constant)
        return sdpa._dot_product_attention_bwd_impl(*arrays, lse_BHL, o_BLHV, do_BLHV, **named)

    return Part(forward, backward)


def sequences_as_heads(part: Part) -> Part:
    """`part` with all sequences as heads of one sequence, so that a bias [B, H, L, S] becomes [1, B H, L, S]."""

    def heads(x_BLHK):
        return x_BLHK.swapaxes(0, 1).reshape(1, x_BLHK.shape[1], -1, x_BLHK.shape[3])

    def apart(x_1LNK, like):
        B, L, H, _ = like.shape
        return x_1LNK.reshape(L, B, H, -1).swapaxes(0, 1)

    def forward(q_BLHK, k, v, bias, constants):
        o, lse = part.forward(*map(heads, (q_BLHK, k, v)), bias.reshape(1, -1, *bias.shape[2:]), constants)
        return apart(o, q_BLHK), lse.reshape(*bias.shape[:3])

    def backward(q_BLHK, k, v, bias, constants, o_BLHV, lse_BHL, do_BLHV):
        arrays = *map(heads, (q_BLHK, k, v)), bias.reshape(1, -1, *bias.shape[2:])
        rest = heads(o_BLHV), lse_BHL.reshape(1, -1, lse_BHL.shape[2]), heads(do_BLHV)
        dq, dk, dv, dbias = part.backward(*arrays, constants, *rest)
        return apart(dq, q_BLHK), apart(dk, k), apart(dv, v), dbias.reshape(bias.shape)

    return Part(forward, backward)
