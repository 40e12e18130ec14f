"""Loss and gradient of one update (program.py), as pure functions of the parameters and the batch.

The loss is (sum of weighted token losses) / (sum of weights in the whole batch) + (sum over tokens of the auxiliary
losses) / (tokens in the whole batch). Both divisors are known before the first microbatch. So the gradients of the
microbatches add up to that of the whole batch, however unequal their token counts are.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xfresearch.kernels.cross_entropy import linear_cross_entropy
from xfresearch.models import transformer
from xfresearch.models.context import Context
from xfresearch.run.config import Config
from xfresearch.runtime.trees import by_path, join
from xfresearch.training.kernel_choices import execution, layers_choice
from xfresearch.training.optimizer import trainable


def init_params(config: Config, seed) -> dict:
    """The initial parameters of a run."""
    return transformer.init(config.model, jax.random.fold_in(jax.random.key(seed), 0))


def make_loss(config: Config, mesh=None) -> Callable:
    """loss(params, batch, key, totals) -> (scalar, metrics). `totals`: weights and tokens of the whole update."""
    layers = layers_choice(config, mesh).name
    training = config.training

    def loss(params, batch, key, totals):
        model = transformer.bind(config.model, params)
        # A stream counts as one document without padding: attention needs no segment mask.
        segments = None if config.data.packing == "stream" else batch["segments"]
        ctx = Context(batch["positions"], segments, key, mesh=mesh, execution=execution(training))
        out = model(batch["tokens"], ctx, layers=layers, remat=training.remat)
        total, nll = linear_cross_entropy(
            out.hidden_BLD,
            model.logit_head(),
            batch["targets"],
            batch["weights"],
            z_loss=training.z_loss,
            rows=training.loss_rows,
            mesh=mesh,
        )
        auxiliary = {name: value.sum() / totals["tokens"] for name, value in out.losses.items()}
        value = total / totals["weights"] + sum(auxiliary.values())
        statistics = jax.tree.map(lambda x_RB: x_RB.sum(1), out.statistics)
        return value, {"loss": nll / totals["weights"], **auxiliary, "statistics": statistics}

    return loss


def tokens_in(batch: dict):
    """Number of tokens that are not padding, at least 1."""
    return jnp.maximum((batch["segments"] > 0).sum(), 1)


def gradients(config: Config, params, batch: dict, key, mesh=None):
    """Gradient of the loss over a whole batch by the trained parameters, in `training.accumulate` microbatches, and the
    metrics.

    The metrics include the model's `statistics`, summed over the batch.
    """
    totals = {
        "weights": jnp.maximum(batch["weights"].sum(), 1),
        "tokens": tokens_in(batch),
    }
    key = key if config.model.random else None
    loss = make_loss(config, mesh)
    trained, frozen = trainable(config.optimizer, params)
    value_and_grad = jax.value_and_grad(lambda trained, *rest: loss(join(trained, frozen), *rest), has_aux=True)
    parts = config.training.accumulate
    if parts == 1:
        (_, metrics), grads = value_and_grad(trained, batch, key, totals)
        return grads, metrics

    def add(sums, xs):
        part, index = xs
        at = None if key is None else jax.random.fold_in(key, index)
        (_, metrics), grads = value_and_grad(trained, part, at, totals)
        return jax.tree.map(jnp.add, sums, (grads, metrics)), None

    # Microbatch i takes rows i, i + parts, ...: so every device that has rows of the batch has rows of each microbatch.
    micro = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    first = jax.tree.map(lambda x: x[0], micro)
    shapes = jax.eval_shape(lambda: value_and_grad(trained, first, key, totals))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[1], shapes[0][1]))
    return jax.lax.scan(add, zeros, (micro, jnp.arange(parts)))[0]


def within_bounds(params, axes):
    """`params` clipped to the bounds in the tree `axes`, for parameters that have bounds."""
    return jax.tree.map(lambda leaf, each: leaf if each.bounds is None else jnp.clip(leaf, *each.bounds), params, axes)


def all_finite(tree):
    """Whether every value of every array of floating-point numbers is finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def layer_norms(tree) -> dict:
    """Euclidean norm of each parameter by its path; for a stack, one norm per layer."""
    return {
        name: jnp.sqrt(jnp.square(leaf).sum(range(1, leaf.ndim) if name.startswith("blocks/") else None))
        for name, leaf in by_path(tree).items()
    }
