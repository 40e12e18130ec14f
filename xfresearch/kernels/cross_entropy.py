"""Cross-entropy of a linear head, without ever holding the logits of all tokens.

    logits_t = table x_t        nll = sum_t w_t (lse_t - logits_t[label_t])        z = z_loss sum_t w_t lse_t^2
    lse_t = log sum_v exp(logits_t[v])

Tokens are taken in tiles. A tile's tokens stand with a stride over all tokens, so that where tokens are cut over
devices every device has its share of every tile. Differentiated, the forward pass computes the gradients too,
from the logits that it has: three matrix products in all, and nothing is computed twice.
"""

from functools import partial

import jax
import jax.numpy as jnp


def linear_cross_entropy(x_TD, table_VD, labels_T, weights_T, *, z_loss=0.0, rows=1024):
    """(total, nll_sum): nll + z, and nll alone, not differentiated. Scalars, float32 (float64 for float64 inputs).

    Logits of at most `rows` tokens exist at once. The gradient is that of `total`, for x, the table and the weights.
    """
    wide = _wide(x_TD)
    total, nll = _sums(x_TD, table_VD, labels_T, weights_T.astype(wide), float(z_loss), rows)
    return total, jax.lax.stop_gradient(nll)


def token_nll(x_TD, table_VD, labels_T, rows=1024):
    """(nll_T, correct_T): of each token, and whether the label is the likeliest one (the first, among equals)."""

    def tile(_, inputs):
        x, labels = inputs
        logits = _logits(x, table_VD)
        return None, (_lse(logits)[0] - _at_label(logits, labels), logits.argmax(-1) == labels)

    T = x_TD.shape[0]
    _, outputs = jax.lax.scan(tile, None, tuple(_tiles(a, rows) for a in (x_TD, labels_T)))
    return tuple(_untile(a, T) for a in outputs)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sums(x_TD, table_VD, labels_T, weights_T, z_loss, rows):
    def tile(sums, inputs):
        x, labels, weights = inputs
        logits = _logits(x, table_VD)
        total, nll = _token_losses(logits, _lse(logits)[0], labels, z_loss)
        return (sums[0] + (weights * total).sum(), sums[1] + (weights * nll).sum()), None

    zero = jnp.zeros((), weights_T.dtype)
    return jax.lax.scan(tile, (zero, zero), tuple(_tiles(a, rows) for a in (x_TD, labels_T, weights_T)))[0]


def _sums_forward(x_TD, table_VD, labels_T, weights_T, z_loss, rows):
    def tile(carry, inputs):
        sums, dtable_VD = carry
        x, labels, weights = inputs
        logits = _logits(x, table_VD)
        lse, p = _lse(logits)
        total, nll = _token_losses(logits, lse, labels, z_loss)
        at_label = jnp.where(_is_label(logits, labels), weights[:, None], 0)
        dlogits = ((weights * (1 + 2 * z_loss * lse))[:, None] * p - at_label).astype(x.dtype)
        dx = jnp.einsum("TV,VD->TD", dlogits, table_VD, preferred_element_type=lse.dtype).astype(x.dtype)
        dtable_VD += jnp.einsum("TV,TD->VD", dlogits, x, preferred_element_type=lse.dtype)
        sums = sums[0] + (weights * total).sum(), sums[1] + (weights * nll).sum()
        return (sums, dtable_VD), (dx, total)

    zero = jnp.zeros((), weights_T.dtype)
    start = (zero, zero), jnp.zeros(table_VD.shape, weights_T.dtype)
    inputs = tuple(_tiles(a, rows) for a in (x_TD, labels_T, weights_T))
    (sums, dtable_VD), outputs = jax.lax.scan(tile, start, inputs)
    dx_TD, dweights_T = (_untile(a, x_TD.shape[0]) for a in outputs)
    return sums, (dx_TD, dtable_VD.astype(table_VD.dtype), dweights_T)


def _sums_backward(z_loss, rows, gradients, cotangents):
    g = cotangents[0]  # that of nll alone is 0: it left through stop_gradient
    dx_TD, dtable_VD, dweights_T = ((g * a).astype(a.dtype) for a in gradients)
    return dx_TD, dtable_VD, None, dweights_T


_sums.defvjp(_sums_forward, _sums_backward)


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _logits(x_TD, table_VD):
    return jnp.einsum("TD,VD->TV", x_TD, table_VD, preferred_element_type=_wide(x_TD))


def _lse(logits_TV):
    """logsumexp, and the softmax that comes with it."""
    top_T1 = logits_TV.max(-1, keepdims=True)
    exp_TV = jnp.exp(logits_TV - top_T1)
    sum_T1 = exp_TV.sum(-1, keepdims=True)
    return (top_T1 + jnp.log(sum_T1))[:, 0], exp_TV / sum_T1


def _is_label(logits_TV, labels_T):
    return jnp.arange(logits_TV.shape[1]) == labels_T[:, None]


def _at_label(logits_TV, labels_T):
    # A sum over the vocabulary, not a gather, which would fetch the whole row where the vocabulary is cut over devices.
    return jnp.where(_is_label(logits_TV, labels_T), logits_TV, 0).sum(-1)


def _token_losses(logits_TV, lse_T, labels_T, z_loss):
    nll_T = lse_T - _at_label(logits_TV, labels_T)
    return nll_T + z_loss * jnp.square(lse_T), nll_T


def _tiles(a_T, rows: int):
    """a_T as [tiles, tokens, ...]: token t is in tile t % tiles; zeros fill the last tokens."""
    T = a_T.shape[0]
    tiles = -(-T // rows)
    tokens = -(-T // tiles)
    a_T = jnp.pad(a_T, [(0, tiles * tokens - T)] + [(0, 0)] * (a_T.ndim - 1))
    return a_T.reshape(tokens, tiles, *a_T.shape[1:]).swapaxes(0, 1)


def _untile(a, T: int):
    return a.swapaxes(0, 1).reshape(-1, *a.shape[2:])[:T]
