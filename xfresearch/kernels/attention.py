"""Softmax attention over a context and persistent memory slots, with one joint softmax (Sukhbaatar et al. 2019, eq. 9).

    w = softmax([cap(scale q Mk^T), cap(scale q k^T) + bias])        o = w [Mv; v]        cap(x) = c tanh(x / c), or x

Memory slots have no position and no batch dimension; every query sees all of them. If RoPE rotates queries and keys,
slots use the queries before the rotation (`memory_q_BLHK`): otherwise their logits depend on the absolute position.

A query at absolute position p sees the keys of its own segment at distances d = p - s from `nearest` (0, or 1 if a
token does not see itself) to `nearest + window - 1` (no limit if the window is 0), and all keys of its segment's
prefix. The numbers of key heads and of value heads may differ; H / G query heads share each of them.

`choose_attention` selects the kernel, by the platform and by what the call needs.
"""

import math
from collections.abc import Callable
from pkgutil import resolve_name
from typing import NamedTuple

import jax.numpy as jnp

from xfresearch.kernels.blocked_attention import blocked
from xfresearch.kernels.choice import KernelChoice, choose
from xfresearch.kernels.defaults import ATTENTION, preferred
from xfresearch.kernels.masks import CAUSAL, Mask, Shaping, Slots
from xfresearch.kernels.on_mesh import share_heads
from xfresearch.kernels.plain_attention import banded, plain
from xfresearch.kernels.tokamax_kernels import refuse_tokamax
from xfresearch.sharding.devices import compute_capability, platform
from xfresearch.sharding.partition import constrain

BIASES = "biases"
SOFTCAP = "softcap"
PREFIXES = "prefixes"


class Call(NamedTuple):
    """What the choice of a kernel depends on: shapes and settings, no values."""

    platform: str  # cpu, gpu or tpu
    capability: tuple[int, ...]  # of an NVIDIA GPU; () for other devices
    dtype: str
    length: int  # L, of the queries
    key_size: int
    value_size: int
    uneven: bool  # keys, values and memory differ in number or size of heads
    memory: int  # M, the number of slots
    sink: bool  # the only slot is a learned sink
    segments: bool
    empty: bool  # a query may see no key
    aligned: bool  # queries and keys have the same positions, from 0
    altered: tuple[str, ...]  # features that change logits or weights (dropout, biases, ...)
    mask: Mask
    context: int  # devices that the sequence is sharded over


def _refuse_plain(call: Call) -> str:
    return ""


def _refuse_banded(call: Call) -> str:
    if not (call.aligned and call.mask.band and 2 * call.mask.band < call.length):
        return "it supports only a causal window shorter than half of the sequence"
    return "it does not support prefixes" if PREFIXES in call.altered else ""


def _refuse_blocked(call: Call) -> str:
    if call.altered or call.sink or call.uneven or call.mask != CAUSAL or not call.aligned:
        without = ", ".join(call.altered + ("a learned sink",) * call.sink)
        without = f", without {without}" if without else ""
        return f"it supports only full causal attention with equal heads for keys, values and slots{without}"
    return f"it does not support a sharded sequence, and mesh.context={call.context}" if call.context > 1 else ""


def _refuse_splash(call: Call) -> str:
    if call.platform != "tpu":
        return f"it needs a TPU, and the platform is {call.platform}"
    return _refuse_fused(call, SOFTCAP) or ("it does not support float64" if call.dtype == "float64" else "")


def _refuse_cudnn(call: Call) -> str:
    if call.platform != "gpu":
        return f"it needs a GPU, and the platform is {call.platform}"
    if call.capability < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or higher (A100)"
    if call.dtype not in ("bfloat16", "float16"):
        return f"it does not support {call.dtype}"
    largest = 256 if call.capability[0] == 9 else 128  # only Hopper's backward pass supports more than 128 (cuDNN 9.18)
    if max(call.key_size, call.value_size) > largest:
        return f"it needs keys and values of at most {largest} numbers on this GPU"
    if call.mask.nearest:
        return "it does not support sees_itself=False"
    # With a mask cuDNN supports no odd lengths, and lengths of 128 n + 64 have given NaNs on Hopper (pytorch#196678).
    if (call.segments or BIASES in call.altered) and call.length % 128:
        return "for packed documents and biases it needs a length that is a multiple of 128"
    if call.context > 1:
        return f"its causal mask does not support a sharded sequence, and mesh.context={call.context}"
    return _refuse_fused(call, BIASES)


def _refuse_tokamax(call: Call) -> str:
    if call.memory:
        return "it does not support memory slots and sinks"
    if call.mask.nearest:
        return "it does not support sees_itself=False"
    if call.context > 1:
        return f"its causal mask does not support a sharded sequence, and mesh.context={call.context}"
    return refuse_tokamax(call.platform, call.dtype, call.capability) or _refuse_fused(call, BIASES)


def _refuse_ring(call: Call) -> str:
    if call.context == 1:
        return "it needs a sequence sharded over mesh.context, which is 1"
    return _refuse_fused(call)


def _refuse_chunked(call: Call) -> str:
    return _refuse_fused(call, SOFTCAP, PREFIXES)


def _refuse_fused(call: Call, *but: str) -> str:
    """Why a fused kernel does not support the call, or ''. `but`: the features of `call.altered` that it does support."""
    altered = [name for name in call.altered if name not in but]
    if altered:
        return f"it does not support {altered[0]}"
    if not call.aligned:
        return "it needs queries and keys at the same positions, from 0"
    return "it does not support queries that see no key (sees_itself=False without memory slots)" if call.empty else ""


# name: function of a call that returns why the kernel does not support it, or ''
REFUSALS = {
    "plain": _refuse_plain,
    "blocked": _refuse_blocked,
    "banded": _refuse_banded,
    "splash": _refuse_splash,
    "cudnn": _refuse_cudnn,
    "tokamax": _refuse_tokamax,
    "chunked": _refuse_chunked,
    "ring": _refuse_ring,
}


def choose_attention(call: Call, implementation="auto") -> KernelChoice[str]:
    """The kernel for `call`, and the reason. Raises UserError if a kernel selected by name does not support it."""
    return choose("training.attention_kernel", implementation, call, REFUSALS, preferred(ATTENTION, call), "plain")


def alterations(**features) -> tuple[str, ...]:
    """`Call.altered` of a call with these features: the names of those in use."""
    return tuple(name for name, value in features.items() if value)


def describe(
    q_BLHK, k_BSGK, v_BSGV, memory=None, segments=None, q_offset=0, mask=CAUSAL, altered=(), mesh=None, sink=False
) -> Call:
    """The Call of `attention` with these arguments, arrays or shapes. segments: (of queries, of keys) or None."""
    heads = {x.shape[2:] for x in (k_BSGK, v_BSGV)} | {m.shape[1:] for m in memory or ()}
    may_see_nothing = bool(mask.nearest) or (segments is not None and segments[0] is not segments[1])
    return Call(
        platform=platform(mesh),
        capability=compute_capability(mesh),
        dtype=str(q_BLHK.dtype),
        length=q_BLHK.shape[1],
        key_size=q_BLHK.shape[3],
        value_size=v_BSGV.shape[3],
        uneven=len(heads) > 1,
        memory=memory[0].shape[0] if memory else 0,
        sink=sink,
        segments=segments is not None,
        empty=may_see_nothing and not memory,
        aligned=isinstance(q_offset, int) and q_offset == 0 and q_BLHK.shape[1] == k_BSGK.shape[1],
        altered=altered,
        mask=mask,
        context=1 if mesh is None else mesh.shape["context"],
    )


def _scaled(factor: float, q_BLHK, memory: Slots | None):
    """The queries, and the queries for the memory, times `factor`."""

    def scale(q):
        return q * jnp.asarray(factor, q.dtype)

    if memory is None or memory.query is None:
        return scale(q_BLHK), memory
    return scale(q_BLHK), memory._replace(query=scale(memory.query))


def _segments(q_segments_BL, k_segments_BS, k_prefix_BS) -> tuple | None:
    """What kernels take as segments: ids of queries and keys, with the prefix if there is one; None without ids."""
    if k_prefix_BS is None:
        return None if q_segments_BL is None else (q_segments_BL, k_segments_BS)
    if q_segments_BL is None:
        raise ValueError("k_prefix_BS needs q_segments_BL and k_segments_BS")
    return q_segments_BL, k_segments_BS, k_prefix_BS


# Kernels that are called alike, imported when one is chosen: Pallas, which splash and ring use, takes a second to import.
FUSED = {
    "splash": "xfresearch.kernels.splash_attention:splash",
    "cudnn": "xfresearch.kernels.cudnn_attention:cudnn",
    "tokamax": "xfresearch.kernels.tokamax_kernels:tokamax_attention",
    "chunked": "xfresearch.kernels.chunked_attention:chunked",
    "ring": "xfresearch.kernels.ring_attention:ring",
}


def attention(
    q_BLHK,
    k_BSGK,
    v_BSGV,
    *,
    memory=None,
    memory_q_BLHK=None,
    sink_H=None,
    q_segments_BL=None,
    k_segments_BS=None,
    k_prefix_BS=None,
    q_offset=0,
    mask=CAUSAL,
    scale=None,
    softcap=0.0,
    bias: Callable | None = None,
    shaping: Shaping | None = None,
    dropout_rate=0.0,
    dropout_key=None,
    tap: Callable | None = None,
    implementation="auto",
    mesh=None,
):
    """o_BLHV, in q's dtype; softmax in float32 (float64 for float64 inputs). A query that sees no key gets 0.

    memory: (mk_MGK, mv_MGV), keys and values that every query sees, in the same softmax.
    memory_q_BLHK: the queries for the memory; q_BLHK by default.
    sink_H: added to the logits of the memory, which is then one slot of zeros: a sink.
    segments: integer ids; a query sees only keys with its own id, and always the memory. Give both or neither.
    k_prefix_BS: not 0 for the keys of a prefix, which all queries of their segment see. Raises ValueError without
        segments.
    q_offset: position of the first query, a number or a traced scalar; keys are at positions 0 to S - 1.
    scale: factor of the logits, 1/sqrt(K) by default.
    softcap: c of the softcap of all logits, memory included, before a bias is added; 0 is none.
    bias(q_BLHK, distance_LS): added to the logits of the context, [1 or B, H, L, S]; -inf hides a key.
    dropout_rate: applied to all weights, memory included, after the normalisation.
    tap(name, value): receives and returns the context's weights [B, H, L, S], named `weights`, and the memory's weights
    [B, H, L, M], named `coefficients`.
    implementation: a name in REFUSALS, or 'auto'. Raises UserError if the named kernel does not support the call.
    mesh: the mesh that the arrays are sharded over, by their letters (sharding/letters.py).
    """
    segments, prefixes = _segments(q_segments_BL, k_segments_BS, k_prefix_BS), k_prefix_BS is not None
    altered = alterations(
        taps=tap, biases=bias, shaping=shaping, dropout=dropout_rate, softcap=softcap, prefixes=prefixes
    )
    sink = sink_H is not None
    call = describe(q_BLHK, k_BSGK, v_BSGV, memory, segments, q_offset, mask, altered, mesh, sink)
    name = choose_attention(call, implementation).name
    _, L, _, K = q_BLHK.shape
    S = k_BSGK.shape[1]
    slots = None if memory is None else Slots(memory_q_BLHK, memory[0], memory[1], sink_H)
    distance_LS = (q_offset + jnp.arange(L))[:, None] - jnp.arange(S)
    if name in FUSED:
        features = {"softcap": softcap} if softcap else {}  # only kernels that support these are selected with them
        if bias is not None:
            as_in_plain = q_BLHK if scale is None else _scaled(scale * math.sqrt(K), q_BLHK, None)[0]
            features["bias"] = bias(as_in_plain, distance_LS)
        q_BLHK, slots = _scaled(1 / math.sqrt(K) if scale is None else scale, q_BLHK, slots)
        kernel = resolve_name(FUSED[name])
        return kernel(q_BLHK, *share_heads(k_BSGK, v_BSGV, slots), segments, mask, mesh, **features)
    k_BSGK, v_BSGV = (constrain(mesh, x, "BSGK") for x in (k_BSGK, v_BSGV))  # every device needs all keys
    if scale is not None:
        q_BLHK, slots = _scaled(scale * math.sqrt(K), q_BLHK, slots)
    if name == "blocked":
        return blocked(q_BLHK, k_BSGK, v_BSGV, slots, segments, mesh)
    rest = {"softcap": softcap, "bias": bias, "shaping": shaping, "dropout": (dropout_rate, dropout_key), "tap": tap}
    if name == "banded":
        return banded(q_BLHK, k_BSGK, v_BSGV, slots, segments, mask, **rest)
    return plain(q_BLHK, k_BSGK, v_BSGV, slots, segments, distance_LS, mask, **rest)
