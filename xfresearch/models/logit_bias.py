"""What is added to attention's logits: ALiBi, T5's buckets, the shared relative key, and the log of an adaptive span's mask.

An adaptive span (Sukhbaatar et al. 2019a, eq. 2-4; its code) multiplies each head's weights by

    m(x) = clamp((z S - x) / R + 1, 0, 1)         x = 0 for the nearest token seen, S the longest span, R the ramp

before they are normalised, together with those of the memory: a = m exp(s) / sum(m exp(s)). That is a softmax of
s + log m, so the span is a bias like the others. z is a number in [0, 1] per head, 0 at first; training moves it back
into that range after every update (models/axes.py). Loss: span_loss * S * mean(z), summed over layers.

Parameters, of all layers together: buckets * H of T5, distances * K of the relative key; of each layer: H of the spans.
FLOPs per token: 2 H K min(distances, L) of the relative key; the others are no matrix products.
"""

import jax.numpy as jnp
from flax import nnx

from xfresearch.config import AttentionConfig, BlockConfig, ModelConfig
from xfresearch.kernels.attention import Sight
from xfresearch.models.positions import alibi_slopes, t5_bucket
from xfresearch.models.sizes import head_sizes, longest


def logit_bias(a: AttentionConfig, ctx, sight: Sight, span):
    """bias(q_BLHK, distance_LS) -> [1 or B, H, L, S] for attention's context, or None."""
    parts = []
    if a.position == "alibi":
        parts.append(lambda q, d_LS: -jnp.asarray(alibi_slopes(a.heads)[:, None, None], _wide(q)) * jnp.abs(d_LS))
    if a.position == "t5":
        table_RH = ctx.relative_bias_RH
        parts.append(lambda q, d_LS: table_RH[t5_bucket(d_LS, a.t5_buckets, a.t5_distance)].transpose(2, 0, 1))
    if a.position == "relative_key":
        key_RK = ctx.relative_key_RK[: sight.window or None]
        parts.append(lambda q, d_LS: _relative(q, key_RK, d_LS - sight.nearest))
    if span is not None:
        parts.append(lambda q, d_LS: span.log_mask(d_LS - sight.nearest, _wide(q)))
    if not parts:
        return None

    def bias(q_BLHK, distance_LS):
        each = [part(q_BLHK, distance_LS) for part in parts]
        return sum(x if x.ndim == 4 else x[None] for x in each)

    return bias


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _relative(q_BLHK, key_RK, steps_LS):
    """q . p_x / sqrt(K) for the relative key p of x steps back (0 is the nearest); q comes scaled."""
    rows = min(key_RK.shape[0], steps_LS.shape[1])
    products = jnp.einsum(
        "blhk,rk->bhlr", q_BLHK, key_RK[:rows].astype(q_BLHK.dtype), preferred_element_type=_wide(q_BLHK)
    )
    index_BHLS = jnp.broadcast_to(jnp.clip(steps_LS, 0, rows - 1), (*products.shape[:2], *steps_LS.shape))
    return jnp.take_along_axis(products, index_BHLS, -1) * q_BLHK.shape[-1] ** -0.5


def relative_flops(model: ModelConfig, block: BlockConfig, length: int) -> int:
    """Matrix products per token of the relative key."""
    a = block.attention
    rows = min(longest(a, model), length)
    return 2 * a.heads * head_sizes(a, model.width).qk * rows if a.position == "relative_key" else 0


class AdaptiveSpan(nnx.Module):
    def __init__(self, model: ModelConfig, a: AttentionConfig):
        self.longest, self.ramp, self.weight = longest(a, model), a.span_ramp, a.span_loss
        self.fraction = nnx.Param(jnp.zeros(a.heads, model.param_dtype))

    def log_mask(self, steps_LS, dtype):
        """log m [H, L, S], -inf where m is 0."""
        reach_H11 = self.fraction[...].astype(dtype)[:, None, None] * self.longest
        m_HLS = jnp.clip((reach_H11 - steps_LS) / self.ramp + 1, 0, 1)
        return jnp.where(m_HLS > 0, jnp.log(jnp.where(m_HLS > 0, m_HLS, 1)), -jnp.inf)

    def loss(self, x_BLD, ctx):
        """The mean span in tokens times its weight, for every token of each sequence [B], as all losses are."""
        wide = _wide(x_BLD)
        tokens_B = (
            jnp.full(x_BLD.shape[0], x_BLD.shape[1]) if ctx.segments_BL is None else (ctx.segments_BL > 0).sum(-1)
        )
        return self.weight * self.longest * self.fraction[...].astype(wide).mean() * tokens_B.astype(wide)
