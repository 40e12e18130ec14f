"""Biases of attention logits: ALiBi, T5's buckets, the shared relative key, and the log of an adaptive span's mask.

An adaptive span (Sukhbaatar et al. 2019a, eq. 2-4; its code) multiplies each head's weights by

    m(x) = clamp((z S - x) / R + 1, 0, 1)         x = 0 for the nearest token seen, S the longest span, R the ramp

before they are normalised together with those of the slots: a = m exp(s) / sum(m exp(s)). This is a softmax of
s + log m, so the span is a bias like the others. z is one number in [0, 1] per head, initially 0; training clips it to
this range after every update. Loss: span_loss * S * mean(z), summed over layers.

Parameters, of all layers together: buckets * H of T5, distances * K of the relative key; of each layer: H of the spans.
FLOPs per token: 2 H K min(distances, L) of the relative key; the others are no matrix products.
"""

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.masks import Mask
from xfresearch.models.mixers.softmax.config import SoftmaxConfig, longest
from xfresearch.models.mixers.softmax.projections import head_sizes
from xfresearch.models.parameters import parameter
from xfresearch.models.place import Place
from xfresearch.models.sublayer import SharedTable


def logit_bias(a: SoftmaxConfig, ctx, mask: Mask, span):
    """bias(q_BLHK, distance_LS) -> [1 or B, H, L, S] for the logits of the context, or None."""
    parts = []
    if a.position == "alibi":
        parts.append(lambda q, d_LS: -jnp.asarray(alibi_slopes(a.heads)[:, None, None], wide_dtype(q)) * jnp.abs(d_LS))
    if a.position == "t5":
        table_RH = ctx.shared["relative_bias"]
        bucket = partial(t5_bucket, buckets=a.t5_buckets, farthest=a.t5_distance, causal=mask.causal)
        parts.append(lambda q, d_LS: table_RH[bucket(d_LS)].transpose(2, 0, 1))
    if a.position == "relative_key":
        key_RK = ctx.shared["relative_key"][: mask.window or None]
        parts.append(lambda q, d_LS: _relative(q, key_RK, d_LS - mask.nearest))
    if span is not None:
        parts.append(lambda q, d_LS: span.log_mask(d_LS - mask.nearest, wide_dtype(q)))
    if not parts:
        return None

    def bias(q_BLHK, distance_LS):
        each = [part(q_BLHK, distance_LS) for part in parts]
        return sum(x if x.ndim == 4 else x[None] for x in each)

    return bias


def _relative(q_BLHK, key_RK, steps_LS):
    """q . p_x / sqrt(K) for the relative key p_x of the token x steps back (0 is the nearest). q is already scaled."""
    rows = min(key_RK.shape[0], steps_LS.shape[1])
    products = jnp.einsum(
        "blhk,rk->bhlr", q_BLHK, key_RK[:rows].astype(q_BLHK.dtype), preferred_element_type=wide_dtype(q_BLHK)
    )
    index_BHLS = jnp.broadcast_to(jnp.clip(steps_LS, 0, rows - 1), (*products.shape[:2], *steps_LS.shape))
    return jnp.take_along_axis(products, index_BHLS, -1) * q_BLHK.shape[-1] ** -0.5


def alibi_slopes(heads: int) -> np.ndarray:
    """2^(-8 h / H) for h = 1 .. H. If H is not a power of two: the slopes of the power below, then every second slope
    of the power above (Press et al. 2022, sec. 3, and their code)."""
    power = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * power + 1, 2))
    return np.concatenate([slopes, between])[:heads]


def t5_bucket(distance, buckets: int, farthest: int, causal: bool = True):
    """The bucket of each distance >= 0: one per distance below buckets/2, then logarithmic; all from `farthest` on are
    in the last one (Raffel et al. 2020, sec. 2.1, and their code). Negative distances, to later keys, have bucket 0. If not
    `causal`, the first half of the buckets is for the keys up to the query, and the second one for later keys."""
    if not causal:
        half = buckets // 2
        return jnp.where(distance < 0, half, 0) + t5_bucket(jnp.abs(distance), half, farthest)
    exact = buckets // 2
    distance = jnp.maximum(distance, 0)
    # A table in float64: in float32, rounding would put some distances into a neighbouring bucket.
    table = np.arange(farthest + 1)
    share = np.log(np.maximum(table, 1) / exact) / math.log(farthest / exact)
    far = np.minimum(exact + (share * (buckets - exact)).astype(int), buckets - 1)
    return jnp.asarray(np.where(table < exact, table, far))[jnp.minimum(distance, farthest)]


def shared_tables(place: Place) -> dict[str, SharedTable]:
    """Tables that all layers share: T5's biases [buckets, H], and the relative key [distances, K] of All-attention, one
    for all heads and layers (Sukhbaatar et al. 2019, code: `key_pe`, drawn from N(0, 1))."""
    a = place.options
    if a.position == "t5":
        return {"relative_bias": SharedTable("RH", (a.t5_buckets, a.heads), drawn=False, grows=False)}
    if a.position == "relative_key":
        rows = longest(a, place.max_length)
        return {"relative_key": SharedTable("RK", (rows, head_sizes(a, place.width).qk), drawn=True, grows=True)}
    return {}


def relative_flops(place: Place, length: int) -> int:
    """FLOPs per token of the relative key's matrix products."""
    a = place.options
    rows = min(longest(a, place.max_length), length)
    return 2 * a.heads * head_sizes(a, place.width).qk * rows if a.position == "relative_key" else 0


class AdaptiveSpan(nnx.Module):
    """The trained spans of the heads. Parameters: H."""

    def __init__(self, a: SoftmaxConfig, place: Place):
        self.longest = longest(a, place.max_length)
        self.ramp = a.span_ramp
        self.weight = a.span_loss
        self.fraction = parameter(jnp.zeros(a.heads, place.param_dtype), "H", bounds=(0.0, 1.0))

    def log_mask(self, steps_LS, dtype):
        """log m [H, L, S], -inf where m is 0."""
        reach_H11 = self.fraction[...].astype(dtype)[:, None, None] * self.longest
        m_HLS = jnp.clip((reach_H11 - steps_LS) / self.ramp + 1, 0, 1)
        return jnp.where(m_HLS > 0, jnp.log(jnp.where(m_HLS > 0, m_HLS, 1)), -jnp.inf)

    def loss(self, x_BLD, ctx):
        """The mean span in tokens times its weight, summed over the tokens of each sequence [B] like all losses."""
        wide = wide_dtype(x_BLD)
        tokens_B = (
            jnp.full(x_BLD.shape[0], x_BLD.shape[1]) if ctx.segments_BL is None else (ctx.segments_BL > 0).sum(-1)
        )
        return self.weight * self.longest * self.fraction[...].astype(wide).mean() * tokens_B.astype(wide)
