"""Cross-entropy of the output head (kernels/head.py), without holding the logits of all tokens at once.

    logits_t = head(x_t)        nll = sum_t w_t (lse_t - logits_t[label_t])        z = z_loss sum_t w_t lse_t^2
    lse_t = log sum_v exp(logits_t[v])

Tokens are processed in tiles. On a GPU the vocabulary of the matrix products is padded with rows of zeros to a round number
(defaults.py), and nothing outside the products sees these rows. Under differentiation the forward pass also computes the
gradients, from the logits it already has: three matrix products in all, and nothing is computed twice.

On a mesh each device has its own tokens and its own shard of the vocabulary. A tile needs three values from the other
shards: the largest logit, the sum of exponentials and the logit at the label. Gradients are summed over devices once,
after the last tile.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from xfresearch.kernels.defaults import loss_rows, vocabulary_multiple
from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.kernels.head import Head
from xfresearch.sharding.devices import platform
from xfresearch.sharding.letters import BATCH
from xfresearch.sharding.partition import activation_spec, parameter_spec

TOKEN_AXES = (*BATCH, "context")  # the mesh axes that shard tokens


def linear_cross_entropy(x_BLD, head: Head, labels_BL, weights_BL, *, z_loss=0.0, rows=0, mesh=None):
    """(total, nll_sum): nll + z, and nll alone. Scalars, float32 (float64 for float64 inputs).

    rows: each device holds the logits of at most this many tokens at once; 0: the default of the device (defaults.py).
    `total` has gradients for x, the head and the weights. `nll_sum` has no gradient.
    """
    rows = rows or _rows(head, mesh)
    total, nll = _sums(x_BLD, head, labels_BL, weights_BL.astype(wide_dtype(x_BLD)), float(z_loss), rows, mesh)
    return total, jax.lax.stop_gradient(nll)


def token_nll(x_BLD, head: Head, labels_BL, rows=0, mesh=None):
    """(nll_BL, correct_BL). correct: the label is the most likely id (the first one, if several are equal)."""
    rows = rows or _rows(head, mesh)

    def local(part: VocabularyShard, x_TD, head, labels_T):
        def tile(_, inputs):
            x, labels = inputs
            logits = head.logits(x)
            return None, (part.lse(logits)[0] - part.at_label(logits, labels), part.argmax(logits) == labels)

        _, outputs = jax.lax.scan(tile, None, tuple(_tiles(a, rows) for a in (x_TD, labels_T)))
        return tuple(_untile(a, x_TD.shape[0]) for a in outputs)

    return _on_devices(local, mesh, "TT", x_BLD, head, labels_BL)


def nll_of_logits(logits_BLV: Any, labels_BL: Any) -> Any:
    """nll_BL of logits that are in memory already. Unlike token_nll it has no loop, which costs a compilation outside
    jit."""
    log_p_BLV = jax.nn.log_softmax(logits_BLV)
    return -jnp.take_along_axis(log_p_BLV, labels_BL[..., None], -1)[..., 0]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _sums(x_BLD, head, labels_BL, weights_BL, z_loss, rows, mesh):
    def local(part: VocabularyShard, x_TD, head, labels_T, weights_T):
        def tile(sums, inputs):
            x, labels, weights = inputs
            logits = head.logits(x)
            total, nll = part.token_losses(logits, part.lse(logits)[0], labels, z_loss)
            return (sums[0] + (weights * total).sum(), sums[1] + (weights * nll).sum()), None

        zero = jnp.zeros((), weights_T.dtype)
        return jax.lax.scan(tile, (zero, zero), tuple(_tiles(a, rows) for a in (x_TD, labels_T, weights_T)))[0]

    return _on_devices(local, mesh, "11", x_BLD, head, labels_BL, weights_BL)


def _sums_forward(x_BLD, head, labels_BL, weights_BL, z_loss, rows, mesh):
    # On a CPU, a product whose result has more rows than columns takes XLA 1.2 to 8 times as long as one of the same numbers
    # that has more columns (jax 0.10 and 0.12). On other devices, turning the sum at the end would take memory.
    table = "DV" if platform(mesh) == "cpu" else "VD"

    def local(part: VocabularyShard, x_TD, head, labels_T, weights_T):
        def tile(sums, inputs):
            x, labels, weights = inputs
            logits = head.logits(x)
            lse, p = part.lse(logits)
            total, nll = part.token_losses(logits, lse, labels, z_loss)
            at_label = jnp.where(part.is_label(logits, labels), weights[:, None], 0)
            dlogits = (weights * (1 + 2 * z_loss * lse))[:, None] * p - at_label
            dx, dtable, dbias_V = head.gradients(x, logits, dlogits, table)
            more = (weights * total).sum(), (weights * nll).sum(), dtable, dbias_V
            return jax.tree.map(jnp.add, sums, more), (part.sum(dx).astype(x.dtype), total)

        zeros, (V, D) = partial(jnp.zeros, dtype=weights_T.dtype), head.table_VD.shape
        dbias_V = None if head.bias_V is None else zeros(head.bias_V.shape)
        start = zeros(()), zeros(()), zeros((D, V) if table == "DV" else (V, D)), dbias_V
        inputs = tuple(_tiles(a, rows) for a in (x_TD, labels_T, weights_T))
        (total, nll, dtable, dbias_V), outputs = jax.lax.scan(tile, start, inputs)
        if table == "DV":
            dtable = jax.lax.optimization_barrier(dtable).T  # without it, XLA may turn the products again
        dhead = replace(head, table_VD=dtable, bias_V=dbias_V).unpadded()
        dx_TD, dweights_T = (_untile(a, x_TD.shape[0]) for a in outputs)
        return total, nll, dx_TD, dhead, dweights_T

    total, nll, dx_BLD, dhead, dweights_BL = _on_devices(local, mesh, "11THT", x_BLD, head, labels_BL, weights_BL)
    dhead = jax.tree.map(lambda d, a: d.astype(a.dtype), dhead, head)
    return (total, nll), (dx_BLD, dhead, dweights_BL)


def _sums_backward(z_loss, rows, mesh, gradients, cotangents):
    g = cotangents[0]  # the cotangent of nll is 0, because of stop_gradient
    dx_BLD, dhead, dweights_BL = jax.tree.map(lambda a: (g * a).astype(a.dtype), gradients)
    return dx_BLD, dhead, None, dweights_BL


_sums.defvjp(_sums_forward, _sums_backward)


def _on_devices(local, mesh, outputs: str, x_BLD, head, *rest_BL):
    """local(part, x_TD, head, *rest_T) on each device's tokens and shard of the vocabulary.

    outputs: one letter for each output. T: one row for each token, returned in the batch's shape. 1: a sum over tokens.
    H: a sum over tokens for the head's arrays, sharded like the parameters.
    """

    multiple = vocabulary_multiple(mesh).name

    def flat(head, x_BLD, *rest_BL):
        part = VocabularyShard(sharded=mesh is not None and mesh.shape["tensor"] > 1)
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        results = local(part, x_TD, head.padded(multiple), *(a.reshape(-1) for a in rest_BL))
        finishers = (partial(finish, kind, x_BLD.shape[:-1]) for kind in outputs)
        return tuple(jax.tree.map(finisher, a) for finisher, a in zip(finishers, results, strict=True))

    def finish(kind: str, rows: tuple, a):
        if kind == "T":
            return a.reshape(*rows, *a.shape[1:])
        if mesh is None:
            return a
        scattered = kind == "H" and a.ndim == 2  # the table, whose width fsdp shards; a bias has no width
        if scattered:
            a = jax.lax.psum_scatter(a, "fsdp", scatter_dimension=1, tiled=True)
        return jax.lax.psum(a, [axis for axis in TOKEN_AXES if (scattered, axis) != (True, "fsdp")])

    if mesh is None:
        return flat(head, x_BLD, *rest_BL)
    tokens = activation_spec(mesh, "BL", x_BLD.shape[:2])
    vocabulary = _head_specs(partial(activation_spec, mesh), head)
    parameters = _head_specs(partial(parameter_spec, mesh, name="of the head"), head)
    out_specs = {"T": tokens, "1": PartitionSpec(), "H": parameters}
    run = jax.shard_map(
        flat,
        mesh=mesh,
        in_specs=(vocabulary, *(tokens for _ in (x_BLD, *rest_BL))),
        out_specs=tuple(out_specs[kind] for kind in outputs),
        check_vma=False,  # the check cannot infer, in a scan, that sums over `tensor` are equal on all its devices
    )
    return run(head, x_BLD, *rest_BL)


def _head_specs(spec, head: Head) -> Head:
    """The PartitionSpecs of the head's arrays, from spec(letters, shape)."""
    bias = None if head.bias_V is None else spec("V", head.bias_V.shape)
    return replace(head, table_VD=spec("VD", head.table_VD.shape), bias_V=bias)


class VocabularyShard:
    """The part of the vocabulary whose logits [T, V] a device has: all of it, or its shard along `tensor`."""

    def __init__(self, sharded: bool):
        self.sharded = sharded

    def sum(self, x):
        return jax.lax.psum(x, "tensor") if self.sharded else x

    def max(self, x):
        # all_gather instead of pmax: JAX has no derivative of pmax, and none is needed here.
        return jax.lax.all_gather(x, "tensor").max(0) if self.sharded else x

    def lse(self, logits_TV):
        """(logsumexp over the whole vocabulary, softmax of the logits in this shard)."""
        top_T1 = self.max(logits_TV.max(-1, keepdims=True))
        exp_TV = jnp.exp(logits_TV - top_T1)
        sum_T1 = self.sum(exp_TV.sum(-1, keepdims=True))
        return (top_T1 + jnp.log(sum_T1))[:, 0], exp_TV / sum_T1

    def ids(self, logits_TV):
        first = jax.lax.axis_index("tensor") * logits_TV.shape[1] if self.sharded else 0
        return first + jnp.arange(logits_TV.shape[1])

    def is_label(self, logits_TV, labels_T):
        return self.ids(logits_TV) == labels_T[:, None]

    def at_label(self, logits_TV, labels_T):
        return self.sum(jnp.where(self.is_label(logits_TV, labels_T), logits_TV, 0).sum(-1))

    def argmax(self, logits_TV):
        """The most likely id; the first one, if several are equal."""
        if not self.sharded:
            return logits_TV.argmax(-1)
        best = self.max(logits_TV.max(-1))
        own = logits_TV.max(-1)
        first = self.ids(logits_TV)[logits_TV.argmax(-1)]
        return jax.lax.pmin(jnp.where(own == best, first, jnp.iinfo(jnp.int32).max), "tensor")

    def token_losses(self, logits_TV, lse_T, labels_T, z_loss):
        nll_T = lse_T - self.at_label(logits_TV, labels_T)
        return nll_T + z_loss * jnp.square(lse_T), nll_T


def _rows(head: Head, mesh) -> int:
    """The default number of rows for the part of the vocabulary that a device has."""
    return int(loss_rows(head.table_VD.shape[0] // (1 if mesh is None else mesh.shape["tensor"]), mesh).name)


def _tiles(a_T, rows: int):
    """a_T as [tiles, tokens, ...], padded with zeros. Token t is in tile t % tiles."""
    T = a_T.shape[0]
    tiles = -(-T // rows)
    tokens = -(-T // tiles)
    a_T = jnp.pad(a_T, [(0, tiles * tokens - T)] + [(0, 0)] * (a_T.ndim - 1))
    return a_T.reshape(tokens, tiles, *a_T.shape[1:]).swapaxes(0, 1)


def _untile(a, T: int):
    return a.swapaxes(0, 1).reshape(-1, *a.shape[2:])[:T]
