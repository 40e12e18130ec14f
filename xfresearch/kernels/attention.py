"""Softmax attention over a context and persistent memory slots, with one joint softmax (Sukhbaatar et al. 2019, eq. 9).

    w = softmax([cap(scale q Mk^T), cap(scale q k^T) + bias])        o = w [Mv; v]        cap(x) = c tanh(x / c), or x

Memory slots have no position and no batch dimension; every query sees all of them. Where queries and keys are rotated by
their positions, slots meet the queries as they were before the rotation (`memory_q_BLHK`): their logits would depend on the
absolute position otherwise. A query at absolute position p sees
the keys of its own segment at distances d = p - s from `nearest` (0, or 1 where it does not see itself) on, `window` of
them. Keys and values may have numbers of heads of their own; each serves H / G query heads.

Which implementation serves a call is decided here, by the platform that it runs on and by what it asks for.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from xfresearch.kernels.blocked_attention import blocked
from xfresearch.kernels.choice import Choice, choose
from xfresearch.kernels.chunked_attention import chunked
from xfresearch.kernels.cudnn_attention import cudnn
from xfresearch.kernels.masks import CAUSAL, Mask, Shaping, Slots
from xfresearch.kernels.on_mesh import share_heads
from xfresearch.kernels.plain_attention import banded, plain
from xfresearch.sharding.devices import compute_capability, platform
from xfresearch.sharding.partition import constrain

__all__ = ["CAUSAL", "Call", "Shaping", "Mask", "attention", "choose_attention", "describe"]


SOFTCAP = "softcap"


class Call(NamedTuple):
    """What a choice depends on: shapes and settings, no values."""

    platform: str  # cpu, gpu or tpu
    capability: tuple[int, ...]  # of an NVIDIA GPU, () of anything else
    dtype: str
    length: int  # of the queries L
    key_size: int
    value_size: int
    uneven: bool  # keys, values and memory differ in heads or size
    memory: int  # slots M
    segments: bool
    empty: bool  # a query may see nothing
    aligned: bool  # queries and keys are of the same positions, from 0
    altered: str  # what changes logits or weights, '' for nothing
    mask: Mask
    context: int  # devices that the sequence is cut over


def _refuse_plain(call: Call) -> str:
    return ""


def _refuse_banded(call: Call) -> str:
    if not (call.aligned and call.mask.band and 2 * call.mask.band < call.length):
        return "it is for a causal window below half of the sequence"
    return ""


def _refuse_blocked(call: Call) -> str:
    if call.altered or call.uneven or call.mask != CAUSAL or not call.aligned:
        return "it is for full causal attention with one number of heads, without " + (call.altered or "anything else")
    return f"it is for whole sequences, mesh.context={call.context} cuts them" if call.context > 1 else ""


def _refuse_splash(call: Call) -> str:
    if call.platform != "tpu":
        return f"it is for TPU, this is {call.platform}"
    return _refuse_capped(call) or ("it has no float64" if call.dtype == "float64" else "")


def _refuse_cudnn(call: Call) -> str:
    if call.platform != "gpu":
        return f"it is for GPU, this is {call.platform}"
    if call.capability < (8, 0):
        return "it is for NVIDIA GPUs from compute capability 8.0 on (A100)"
    if call.dtype not in ("bfloat16", "float16"):
        return f"it has no {call.dtype}"
    largest = 256 if call.capability[0] == 9 else 128  # Hopper's backward pass alone has more than 128 (cuDNN 9.18)
    if call.key_size != call.value_size or call.key_size % 8 or call.key_size > largest:
        return f"it is for keys and values of one size, on this GPU a multiple of 8 to {largest}"
    if call.segments or call.mask.nearest:
        return "it has no documents and no queries that do not see themselves"
    if call.context > 1:
        return "its causal mask is for a sequence that is not cut over mesh.context"
    return _refuse_fused(call)


def _refuse_ring(call: Call) -> str:
    if call.context == 1:
        return "it is for a sequence cut over mesh.context, which is 1"
    return _refuse_fused(call)


def _refuse_fused(call: Call) -> str:
    """What no kernel of a library does."""
    if call.altered:
        return f"it has no {call.altered}"
    if not call.aligned:
        return "it is for queries and keys of the same positions, from 0"
    return "it has no queries that see nothing (sees_itself=False without memory slots)" if call.empty else ""


def _refuse_capped(call: Call) -> str:
    """What those of them that have a softcap do not do."""
    return _refuse_fused(call._replace(altered="") if call.altered == SOFTCAP else call)


# name: why it cannot serve a call, '' where it can
REFUSALS = {
    "plain": _refuse_plain,
    "blocked": _refuse_blocked,
    "banded": _refuse_banded,
    "splash": _refuse_splash,
    "cudnn": _refuse_cudnn,
    "chunked": _refuse_capped,
    "ring": _refuse_ring,
}
WINDOW, NO_MATRIX = "computes a window alone", "skips masked blocks, holds no matrix of weights"
# platform: what 'auto' tries in turn before plain, and what speaks for it
PREFERENCES = {
    "cpu": {"banded": WINDOW, "blocked": "skips masked keys and saves its weights: fast on CPU"},
    "gpu": {"cudnn": NO_MATRIX, "banded": WINDOW, "chunked": "holds no matrix of weights"},
    "tpu": {"splash": NO_MATRIX, "banded": WINDOW},
}


def choose_attention(call: Call, implementation="auto") -> Choice:
    """Which implementation serves `call`, and why. UserError for one asked for by name that cannot serve it."""
    return choose("training.attention_kernel", implementation, call, REFUSALS, PREFERENCES.get(call.platform, {}), "plain")


def alteration(**asked) -> str:
    """What `Call.altered` says of a call that asks for these: the first that it does, a softcap after all others."""
    return next((name for name, value in asked.items() if value), "")


def describe(
    q_BLHK, k_BSGK, v_BSGV, memory=None, segments=None, q_offset=0, mask=CAUSAL, altered="", mesh=None
) -> Call:
    """The call of attention with these arguments, arrays or shapes. segments: of queries and of keys, or None."""
    heads = {x.shape[2:] for x in (k_BSGK, v_BSGV)} | {m.shape[1:] for m in memory or ()}
    blind = bool(mask.nearest) or (segments is not None and segments[0] is not segments[1])
    return Call(
        platform=platform(mesh),
        capability=compute_capability(mesh),
        dtype=str(q_BLHK.dtype),
        length=q_BLHK.shape[1],
        key_size=q_BLHK.shape[3],
        value_size=v_BSGV.shape[3],
        uneven=len(heads) > 1,
        memory=memory[0].shape[0] if memory else 0,
        segments=segments is not None,
        empty=blind and not memory,
        aligned=isinstance(q_offset, int) and q_offset == 0 and q_BLHK.shape[1] == k_BSGK.shape[1],
        altered=altered,
        mask=mask,
        context=1 if mesh is None else mesh.shape["context"],
    )


def _scaled(factor: float, q_BLHK, memory: Slots | None):
    """The queries, and those that meet the memory, times `factor`."""

    def scale(q):
        return q * jnp.asarray(factor, q.dtype)

    own = None if memory is None else memory.query
    return scale(q_BLHK), memory if own is None else memory._replace(query=scale(own))


def _splash(*arguments, **options):
    from xfresearch.kernels.splash_attention import splash  # Pallas takes a second to import

    return splash(*arguments, **options)


def _ring(*arguments, **options):
    from xfresearch.kernels.ring_attention import ring  # for the same reason

    return ring(*arguments, **options)


FUSED = {"splash": _splash, "cudnn": cudnn, "chunked": chunked, "ring": _ring}  # all have the same signature


def attention(
    q_BLHK,
    k_BSGK,
    v_BSGV,
    *,
    memory=None,
    memory_q_BLHK=None,
    q_segments_BL=None,
    k_segments_BS=None,
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
    """o_BLHV, in q's dtype; softmax in float32 (float64 for float64 inputs). A query that sees nothing gets 0.

    memory: (mk_MGK, mv_MGV), keys and values that every query sees, in the same softmax.
    memory_q_BLHK: the queries that meet the memory; q_BLHK itself unless given.
    segments: integers; a query sees the keys of equal ones only (and the memory always). Both or neither.
    q_offset: position of the first query, keys being at 0 to S - 1; a number or a traced scalar.
    scale: factor of the logits, 1/sqrt(K) unless given.
    softcap: c of the logits' cap, memory's included, before a bias is added; 0 is none.
    bias(q_BLHK, distance_LS): what is added to the logits of the context, [1 or B, H, L, S]; -inf hides a key.
    dropout_rate: of the weights, memory's included, after they are normalised.
    tap(name, value): is given the weights [B, H, L, S] and those of the memory [B, H, L, M], as `weights` and
    `coefficients`, and returns them.
    implementation: a name in REFUSALS, or 'auto'; UserError for one that cannot serve the call.
    mesh: what the arrays lie on, laid out as models/axes.py says for their letters.
    """
    segments = None if q_segments_BL is None else (q_segments_BL, k_segments_BS)
    altered = alteration(taps=tap, biases=bias, shaping=shaping, dropout=dropout_rate, softcap=softcap)
    call = describe(q_BLHK, k_BSGK, v_BSGV, memory, segments, q_offset, mask, altered, mesh)
    name = choose_attention(call, implementation).name
    (L, K), S = (q_BLHK.shape[1], q_BLHK.shape[3]), k_BSGK.shape[1]
    if memory is not None:
        memory = Slots(memory_q_BLHK, *memory)
    if name in FUSED:
        q_BLHK, memory = _scaled(1 / math.sqrt(K) if scale is None else scale, q_BLHK, memory)
        capped = {"softcap": softcap} if softcap else {}  # splash and chunked alone are chosen then
        return FUSED[name](q_BLHK, *share_heads(k_BSGK, v_BSGV, memory), segments, mask, mesh, **capped)
    k_BSGK, v_BSGV = (constrain(mesh, x, "BSGK") for x in (k_BSGK, v_BSGV))  # every device needs all keys
    if scale is not None:
        q_BLHK, memory = _scaled(scale * math.sqrt(K), q_BLHK, memory)
    if name == "blocked":
        return blocked(q_BLHK, k_BSGK, v_BSGV, memory, segments, mesh)
    rest = {"softcap": softcap, "bias": bias, "shaping": shaping, "dropout": (dropout_rate, dropout_key), "tap": tap}
    if name == "banded":
        return banded(q_BLHK, k_BSGK, v_BSGV, memory, segments, mask, **rest)
    distance_LS = (q_offset + jnp.arange(L))[:, None] - jnp.arange(S)
    return plain(q_BLHK, k_BSGK, v_BSGV, memory, segments, distance_LS, mask, **rest)
