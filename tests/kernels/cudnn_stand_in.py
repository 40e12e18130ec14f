"""What cuDNN is asked for, computed in plain JAX: stands in for its kernels on a CPU."""

import jax
import jax.numpy as jnp

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.masks import Mask


def forward(q, k, v, bias, *unused, is_training, **settings):
    """(o, lse), as `_dot_product_attention_fwd_impl` of JAX's module of cuDNN functions; o alone without training."""
    assert q.shape[3] % 8 == 0 and q.shape[3] == v.shape[3]
    p, lse_BHL = _probabilities(q, k, bias, settings)
    o = jnp.einsum("bhls,bshk->blhk", p, jnp.repeat(v, q.shape[2] // v.shape[2], 2)).astype(q.dtype)
    return (o, lse_BHL)[: 1 + is_training]


def backward(q, k, v, bias, *rest, **settings):
    """(dq, dk, dv), with the gradient of the bias if it is asked for, as `_dot_product_attention_bwd_impl`."""
    lse_BHL, o, do = rest[-3:]
    p, _ = _probabilities(q, k, bias, settings, lse_BHL)
    wide_k, wide_v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    delta = (do * o).sum(-1).swapaxes(1, 2)[..., None]
    ds = p * (jnp.einsum("blhk,bshk->bhls", do, wide_v) - delta)
    dq, dk = jnp.einsum("bhls,bshk->blhk", ds, wide_k), jnp.einsum("bhls,blhk->bshk", ds, q)
    dv = jnp.einsum("bhls,blhk->bshk", p, do)
    gradients = dq, *(x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3]).sum(3) for x in (dk, dv))
    if settings["variadic_args"] == (True, True):
        assert bias.shape[:2] == (1, q.shape[2])  # cuDNN's gradient is known to be right only for such a bias
        gradients = *gradients, ds.sum(0, keepdims=True)
    return [x.astype(q.dtype) for x in gradients]


def _probabilities(q, k, bias, settings, lse_BHL=None):
    """(exp(logits - lse), lse). lse: that of these logits, unless given."""
    from jax._src.cudnn import fused_attention_stablehlo as sdpa

    wide = wide_dtype(q)
    keys = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    logits = jnp.einsum("blhk,bshk->bhls", q, keys, preferred_element_type=wide)
    if settings["variadic_args"][0]:
        logits += bias + (bias - bias)  # cuDNN subtracts hidden logits from each other: infinite ones give NaN
    mask = Mask(settings["mask_type"] == sdpa.MaskType.CAUSAL, window=settings["sliding_window_length"] or 0)
    seen = mask.sees(jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1]))
    logits = logits if seen is None else jnp.where(seen, logits, -jnp.inf)
    lse_BHL = jax.nn.logsumexp(logits, -1) if lse_BHL is None else lse_BHL
    return jnp.exp(logits - lse_BHL[..., None]), lse_BHL
