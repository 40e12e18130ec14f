"""Softmax attention over a context and persistent memory slots, with one joint softmax (Sukhbaatar et al. 2019, eq. 9).

    w = softmax([scale q Mk^T, scale q k^T + bias])        o = w [Mv; v]

Memory slots have no position and no batch dimension; every query sees all of them. A query at absolute position p sees
the keys of its own segment at distances d = p - s from `nearest` (0, or 1 where it does not see itself) on, `window` of
them. Keys and values may have numbers of heads of their own; each serves H / G query heads.

`plain` writes the equation down. `banded` is plain over blocks no longer than the window needs, `blocked` is for training
on CPU: see `_in_parts`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.errors import UserError, nearest

IMPLEMENTATIONS = ("auto", "plain", "blocked", "banded")
BLOCKS, PARTS = 4, 4  # blocks of queries, parts of the batch: the fastest of 1, 2, 4, 8 at 256 tokens on 2 cores
SMALLEST_BAND = 32  # smaller matrix products waste more than they save


class Choice(NamedTuple):
    name: str
    reason: str


class Sight(NamedTuple):
    """Which distances d = position of the query - position of the key are seen."""

    causal: bool = True
    nearest: int = 0  # 1: all but itself
    window: int = 0  # how many distances; 0: all

    def sees(self, distance):
        if not self.causal:
            return None
        seen = distance >= self.nearest
        return seen & (distance < self.nearest + self.window) if self.window else seen

    @property
    def band(self) -> int:
        """A length that no distance exceeds, at least SMALLEST_BAND; 0 where there is none."""
        return max(self.window, SMALLEST_BAND) if self.causal and self.window else 0


CAUSAL = Sight()


class Shaping(NamedTuple):
    """aI + bA - cC in place of the weights A, C being the uniform ones (He & Hofmann 2023, eq. 5): a number per head."""

    identity_H: jax.Array
    weights_H: jax.Array
    uniform_H: jax.Array | float


def choose_attention(
    q_BLHK,
    k_BSGK,
    *,
    q_offset=0,
    sight=CAUSAL,
    uneven=False,
    extra=False,
    dropout_rate=0.0,
    implementation="auto",
    backend=None,
) -> Choice:
    """Which implementation serves this call, and why. `backend` is JAX's default one unless given; `extra` says that
    logits or weights are altered, `uneven` that keys, values and memory differ in heads or size.

    A call that the implementation asked for cannot serve is served by `plain`.
    """
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS) + nearest(implementation, IMPLEMENTATIONS)
        raise UserError(f"attention implementation={implementation!r} is not allowed: it must be one of {allowed}")
    if implementation == "plain":
        return Choice("plain", "asked for")
    if not sight.causal:
        return Choice("plain", "the others are for causal attention")
    if not (isinstance(q_offset, int) and q_offset == 0 and q_BLHK.shape[1] == k_BSGK.shape[1]):
        return Choice("plain", "the others are for queries and keys of the same positions, from 0")
    if implementation != "blocked" and sight.band and 2 * sight.band < q_BLHK.shape[1]:
        return Choice("banded", f"the window needs {2 * sight.band} keys of {q_BLHK.shape[1]}")
    if implementation == "banded":
        return Choice("plain", "banded is for a window below half of the sequence")
    backend = backend or jax.default_backend()
    if implementation == "auto" and backend != "cpu":
        return Choice("plain", f"no other implementation for {backend}")
    if dropout_rate > 0:
        return Choice("plain", "blocked has no dropout")
    if extra or uneven or sight != CAUSAL:
        return Choice("plain", "blocked is for full causal attention with one number of heads, without biases")
    reason = "asked for" if implementation == "blocked" else "skips masked keys and saves its weights: fast on CPU"
    return Choice("blocked", reason)


def attention(
    q_BLHK,
    k_BSGK,
    v_BSGV,
    *,
    memory=None,
    q_segments_BL=None,
    k_segments_BS=None,
    q_offset=0,
    sight=CAUSAL,
    scale=None,
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
    segments: integers; a query sees the keys of equal ones only (and the memory always). Both or neither.
    q_offset: position of the first query, keys being at 0 to S - 1; a number or a traced scalar.
    scale: factor of the logits, 1/sqrt(K) unless given.
    bias(q_BLHK, distance_LS): what is added to the logits of the context, [1 or B, H, L, S]; -inf hides a key.
    dropout_rate: of the weights, memory's included, after they are normalised.
    tap(name, value): is given the weights [B, H, L, S] and those of the memory [B, H, L, M], as `weights` and
    `coefficients`, and returns them.
    """
    heads = {k_BSGK.shape[2:], v_BSGV.shape[2:]} | ({m.shape[1:] for m in memory} if memory else set())
    choice = choose_attention(
        q_BLHK,
        k_BSGK,
        q_offset=q_offset,
        sight=sight,
        uneven=len(heads) > 1,
        extra=bool(bias or shaping),
        dropout_rate=dropout_rate,
        implementation="plain" if tap else implementation,
    )
    (B, L, H, K), S = q_BLHK.shape, k_BSGK.shape[1]
    if scale is not None:
        q_BLHK = q_BLHK * jnp.asarray(scale * math.sqrt(K), q_BLHK.dtype)
    segments = None if q_segments_BL is None else (q_segments_BL, k_segments_BS)
    if choice.name == "blocked":
        q_BLGRK = q_BLHK.reshape(B, L, -1, H // k_BSGK.shape[2], K)
        return _in_parts(q_BLGRK, k_BSGK, v_BSGV, memory, segments).reshape(B, L, H, K)
    rest = {"bias": bias, "shaping": shaping, "dropout": (dropout_rate, dropout_key), "tap": tap}
    if choice.name == "banded":
        return _banded(q_BLHK, k_BSGK, v_BSGV, memory, segments, sight, **rest)
    distance_LS = (q_offset + jnp.arange(L))[:, None] - jnp.arange(S)
    return _plain(q_BLHK, k_BSGK, v_BSGV, memory, segments, distance_LS, sight, **rest)


def _mask(distance_LS, sight: Sight, segments):
    """Who sees whom: [B or 1, L, S], or None where everyone sees everyone."""
    mask = sight.sees(distance_LS)
    mask = None if mask is None else mask[None]
    if segments is not None:
        same_BLS = segments[0][:, :, None] == segments[1][:, None, :]
        mask = same_BLS if mask is None else mask & same_BLS
    return mask


def _softmax_dtype(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _plain(q_BLHK, k_BSGK, v_BSGV, memory, segments, distance_LS, sight, bias, shaping, dropout, tap):
    dtype, wide, M = q_BLHK.dtype, _softmax_dtype(q_BLHK), 0 if memory is None else memory[0].shape[0]
    mask_BLS = _mask(distance_LS, sight, segments)
    mask_BHLS = None if mask_BLS is None else mask_BLS[:, None]
    logits_BHLS = _scores(q_BLHK, k_BSGK)
    if bias is not None:
        logits_BHLS += bias(q_BLHK, distance_LS).astype(wide)
    if mask_BHLS is not None:
        logits_BHLS = jnp.where(mask_BHLS, logits_BHLS, jnp.finfo(wide).min)
    if memory is not None:
        logits_BHLS = jnp.concatenate([_scores(q_BLHK, memory[0]), logits_BHLS], -1)
    weights = jax.nn.softmax(logits_BHLS, -1)
    rate, key = dropout
    if rate > 0:
        weights = jnp.where(jax.random.bernoulli(key, 1 - rate, weights.shape), weights / (1 - rate), 0)
    to_memory, to_context = jnp.split(weights, [M], -1)
    if segments is not None or sight.nearest:  # where a query sees no key, its weights are equal instead of zero
        to_context = jnp.where(mask_BHLS, to_context, 0)
    if shaping is not None:
        to_context = _shape(shaping, to_context, mask_BHLS, distance_LS)
    to_context = tap("weights", to_context) if tap else to_context
    o_BLHV = _mix(to_context.astype(dtype), v_BSGV)
    if memory is not None:
        to_memory = tap("coefficients", to_memory) if tap else to_memory
        o_BLHV += _mix(to_memory.astype(dtype), memory[1])
    return o_BLHV.astype(dtype)


# Query heads that share keys are one matrix of rows (r, l): with R and L apart, XLA on CPU takes 1.5 times as long.


def _scores(q_BLHK, k):
    """Logits [B, H, L, S] of keys [B, S, G, K], or [M, G, K] for every sequence."""
    (B, L, H, K), (S, G) = q_BLHK.shape, k.shape[-3:-1]
    q_BGNK = q_BLHK.transpose(0, 2, 1, 3).reshape(B, G, -1, K)
    product = "BGNK,BSGK->BGNS" if k.ndim == 4 else "BGNK,SGK->BGNS"
    return jnp.einsum(product, q_BGNK, k, preferred_element_type=_softmax_dtype(k)).reshape(B, H, L, S) / math.sqrt(K)


def _mix(w_BHLS, v):
    """Weighted sums [B, L, H, V] of values [B, S, G, V], or [M, G, V] for every sequence."""
    (B, H, L, S), (G, V) = w_BHLS.shape, v.shape[-2:]
    product = "BGNS,BSGV->BGNV" if v.ndim == 4 else "BGNS,SGV->BGNV"
    o = jnp.einsum(product, w_BHLS.reshape(B, G, -1, S), v, preferred_element_type=_softmax_dtype(v))
    return o.reshape(B, H, L, V).transpose(0, 2, 1, 3)


def _shape(shaping: Shaping, w_BHLS, mask_BHLS, distance_LS):
    identity, weights, uniform = (jnp.asarray(x, w_BHLS.dtype).reshape(-1, 1, 1) for x in shaping)
    seen = jnp.ones((1, 1, *distance_LS.shape), bool) if mask_BHLS is None else mask_BHLS
    uniform_BHLS = seen / jnp.maximum(seen.sum(-1, keepdims=True), 1).astype(w_BHLS.dtype)
    return identity * (distance_LS == 0) + weights * w_BHLS - uniform * uniform_BHLS


def _banded(q_BLHK, k_BSGK, v_BSGV, memory, segments, sight, **rest):
    """Blocks of queries as long as the band, each against its own keys and those of the block before."""
    B, L, b = *q_BLHK.shape[:2], sight.band
    count = -(-L // b)

    def queries(x, fill=0):
        padded = jnp.pad(x, ((0, 0), (0, count * b - L)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
        return padded.reshape(B * count, b, *x.shape[2:])

    def keys(x, fill=0):
        own = queries(x, fill).reshape(B, count, b, *x.shape[2:])
        before = jnp.pad(own[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (own.ndim - 2), constant_values=fill)
        return jnp.concatenate([before, own], 2).reshape(B * count, 2 * b, *x.shape[2:])

    q_segments, k_segments = segments or (jnp.zeros((B, L), jnp.int32),) * 2
    inside = queries(q_segments, -1), keys(k_segments, -2)  # what is padded is seen by nobody
    distance_LS = (b + jnp.arange(b))[:, None] - jnp.arange(2 * b)
    o = _plain(queries(q_BLHK), keys(k_BSGK), keys(v_BSGV), memory, inside, distance_LS, sight, **rest)
    return o.reshape(B, count * b, *o.shape[2:])[:, :L]


# Each block of queries is computed against the keys up to its own end. Heads come first, then the batch: so both the
# context (G and B are batch dimensions) and the memory (G alone is) are plain matrix products without a copy; a row N
# is a query l and one of the R heads that share keys. Weights are saved unnormalised, with the reciprocal of their sum:
# normalising the outputs is cheaper. XLA on CPU runs a small product on one core, but independent chains of operations
# side by side: hence the blocks, and the parts of the batch, taken with a stride so that a batch cut over devices stays
# where it is.


def _in_parts(q_BLGRK, k_BSGK, v_BSGK, memory, segments):
    B = q_BLGRK.shape[0]
    count = math.gcd(B, PARTS)

    def split(x):
        return [part.squeeze(1) for part in jnp.split(x.reshape(B // count, count, *x.shape[1:]), count, 1)]

    parts_of_segments = list(zip(*map(split, segments), strict=True)) if segments else [None] * count
    parts = zip(split(q_BLGRK), split(k_BSGK), split(v_BSGK), parts_of_segments, strict=True)
    return jnp.stack([_blocked(q, k, v, memory, s) for q, k, v, s in parts], 1).reshape(q_BLGRK.shape)


@jax.custom_vjp
def _blocked(q_BLGRK, k_BSGK, v_BSGK, memory, segments):
    return _blocked_forward(q_BLGRK, k_BSGK, v_BSGK, memory, segments)[0]


def _spans(length: int) -> list[tuple[int, int]]:
    size = -(-length // BLOCKS)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _rows(x_BLGRK):
    """x_GBNK: heads first, rows (l, r)."""
    B, L, G, R, K = x_BLGRK.shape
    return x_BLGRK.transpose(2, 0, 1, 3, 4).reshape(G, B, L * R, K)


def _unrows(parts, shape):
    """The inverse of `_rows`, of consecutive rows."""
    B, L, G, R, K = shape
    return jnp.concatenate(parts, 2).reshape(G, B, L, R, K).transpose(1, 2, 0, 3, 4)


def _blocked_forward(q_BLGRK, k_BSGK, v_BSGK, memory, segments):
    R = q_BLGRK.shape[3]
    q, k, v = _rows(q_BLGRK), k_BSGK.transpose(2, 0, 1, 3), v_BSGK.transpose(2, 0, 1, 3)
    outputs, saved = [], []
    for start, end in _spans(q_BLGRK.shape[1]):
        part = segments and (segments[0][:, start:end], segments[1][:, :end])
        distance_LS = jnp.arange(start, end)[:, None] - jnp.arange(end)
        mask_BNS = jnp.repeat(_mask(distance_LS, CAUSAL, part), R, 1)
        rows = q[:, :, start * R : end * R]
        o, weights = _block_forward(rows, k[:, :, :end], v[:, :, :end], memory, mask_BNS, segments is not None)
        outputs.append(o)
        saved.append(weights)
    o_BLGRK = _unrows(outputs, q_BLGRK.shape).astype(q.dtype)
    return o_BLGRK, (q, k, v, memory, o_BLGRK, saved)


def _block_forward(q_GBNK, k_GBSK, v_GBSK, memory, mask_BNS, empty_rows: bool):
    wide, dtype, scale = _softmax_dtype(q_GBNK), q_GBNK.dtype, 1 / math.sqrt(q_GBNK.shape[-1])
    logits = jnp.einsum("GBNK,GBSK->GBNS", q_GBNK, k_GBSK, preferred_element_type=wide) * scale
    logits = jnp.where(mask_BNS, logits, jnp.finfo(wide).min)
    top, to_memory, pm = logits.max(-1, keepdims=True), None, None
    if memory is not None:
        to_memory = jnp.einsum("GBNK,MGK->GBNM", q_GBNK, memory[0], preferred_element_type=wide) * scale
        top = jnp.maximum(top, to_memory.max(-1, keepdims=True))
    p = jnp.exp(logits - top)
    if empty_rows:
        p = jnp.where(mask_BNS, p, 0)
    total = p.sum(-1, keepdims=True)
    o = jnp.einsum("GBNS,GBSK->GBNK", p.astype(dtype), v_GBSK, preferred_element_type=wide)
    if memory is not None:
        pm = jnp.exp(to_memory - top)
        total += pm.sum(-1, keepdims=True)
        pm = pm.astype(dtype)
        o += jnp.einsum("GBNM,MGK->GBNK", pm, memory[1], preferred_element_type=wide)
    reciprocal = 1 / jnp.where(total > 0, total, 1)
    return o * reciprocal, (p.astype(dtype), pm, reciprocal)


def _blocked_backward(residuals, do_BLGRK):
    q, k, v, memory, o_BLGRK, saved = residuals
    (L, _, R), wide = o_BLGRK.shape[1:4], _softmax_dtype(q)
    do, delta = _rows(do_BLGRK), _rows((do_BLGRK.astype(wide) * o_BLGRK).sum(-1, keepdims=True))
    blocks = []
    for (start, end), weights in zip(_spans(L), saved, strict=True):
        rows = (slice(None), slice(None), slice(start * R, end * R))
        blocks.append(_block_backward(q[rows], k[:, :, :end], v[:, :, :end], memory, weights, do[rows], delta[rows]))
    dq, dk, dv, dmemory = zip(*blocks, strict=True)
    dq_BLGRK = _unrows(dq, o_BLGRK.shape).astype(q.dtype)
    dk_BSGK, dv_BSGK = (_sum_prefixes(x, L).transpose(1, 2, 0, 3).astype(q.dtype) for x in (dk, dv))
    if memory is not None:
        dmemory = tuple(sum(x).astype(m.dtype) for x, m in zip(zip(*dmemory, strict=True), memory, strict=True))
    return dq_BLGRK, dk_BSGK, dv_BSGK, None if memory is None else dmemory, None


def _block_backward(q_GBNK, k_GBSK, v_GBSK, memory, weights, do_GBNK, delta_GBN1):
    p, pm, reciprocal = weights
    wide, dtype, scale = reciprocal.dtype, q_GBNK.dtype, 1 / math.sqrt(q_GBNK.shape[-1])
    g, delta = (do_GBNK * reciprocal).astype(dtype), delta_GBN1 * reciprocal
    dp = jnp.einsum("GBNK,GBSK->GBNS", g, v_GBSK, preferred_element_type=wide)
    ds = (p * (dp - delta) * scale).astype(dtype)
    dq = jnp.einsum("GBNS,GBSK->GBNK", ds, k_GBSK, preferred_element_type=wide)
    dk = jnp.einsum("GBNS,GBNK->GBSK", ds, q_GBNK, preferred_element_type=wide)
    dv = jnp.einsum("GBNS,GBNK->GBSK", p, g, preferred_element_type=wide)
    if memory is None:
        return dq, dk, dv, None
    dp = jnp.einsum("GBNK,MGK->GBNM", g, memory[1], preferred_element_type=wide)
    ds = (pm * (dp - delta) * scale).astype(dtype)
    dq += jnp.einsum("GBNM,MGK->GBNK", ds, memory[0], preferred_element_type=wide)
    dmk = jnp.einsum("GBNM,GBNK->MGK", ds, q_GBNK, preferred_element_type=wide)
    dmv = jnp.einsum("GBNM,GBNK->MGK", pm, g, preferred_element_type=wide)
    return dq, dk, dv, (dmk, dmv)


def _sum_prefixes(parts, length: int):
    """Sum of arrays [G, B, s, K], each zero beyond its own s, up to `length`."""
    return sum(jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0))) for x in parts)


_blocked.defvjp(_blocked_forward, _blocked_backward)
