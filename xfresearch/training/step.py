"""Loss, gradient and router metrics of one update (program.py), as pure functions of the parameters and the batch.

The loss is (sum of weighted token losses) / (sum of weights in the whole batch) + for each stack of blocks, (sum over its
tokens of its auxiliary losses) / (its tokens in the whole batch). All divisors are known before the first microbatch. So the
gradients of the microbatches add up to that of the whole batch, however unequal their token counts are.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from xfresearch.kernels.cross_entropy import linear_cross_entropy
from xfresearch.models import encoder, transformer
from xfresearch.models.context import Context, add_losses, source_in
from xfresearch.run_config.config import Config
from xfresearch.runtime.trees import by_path, join
from xfresearch.training.kernel_choices import execution, layers_choice

CHOICES = ("router_load", "router_drops")  # metrics of routers that are divided by choices; the others by tokens


def init_params(config: Config, seed) -> dict:
    """The initial parameters of a run."""
    return transformer.init(config.model, jax.random.fold_in(jax.random.key(seed), 0))


def make_loss(config: Config, mesh=None) -> Callable:
    """loss(trained, frozen, batch, key, totals) -> (scalar, metrics) of the parameters, of which some are trained and the
    others frozen. `totals` are those of the whole update."""
    layers = layers_choice(config, mesh).name
    training = config.training

    def loss(trained, frozen, batch, key, totals):
        model = transformer.bind(config.model, join(trained, frozen))
        source = source_in(batch)
        prefix = batch.get("prefix")
        # A stream counts as one document without padding: attention needs no segment mask.
        whole = config.data.packing == "stream" and source is None and prefix is None
        segments = None if whole else batch["segments"]
        inputs = {"source": source, "prefix_BL": prefix}
        ctx = Context(batch["positions"], segments, key, **inputs, mesh=mesh, execution=execution(training))
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
        auxiliary: dict = {}
        for name, value_B in out.losses.items():
            mean = value_B.sum() / totals["tokens"][encoder.stack_of(name)]
            auxiliary = add_losses(auxiliary, {name.rpartition("/")[2]: mean})
        value = total / totals["weights"] + sum(auxiliary.values())
        statistics = jax.tree.map(lambda x_RB: x_RB.sum(1), out.statistics)
        return value, {"loss": nll / totals["weights"], **auxiliary, "statistics": statistics}

    return loss


def tokens_in(batch: dict) -> dict:
    """{stack: number of its tokens that are not padding, at least 1}, of the decoder ('') and of the encoder."""
    segments = {"": batch["segments"]} | ({encoder.NAME: batch["source_segments"]} if "source" in batch else {})
    return {stack: jnp.maximum((each > 0).sum(), 1) for stack, each in segments.items()}


def totals_of(batch: dict) -> dict:
    """What the loss of a batch divides by: the sum of its weights, and the tokens of each stack."""
    return {"weights": jnp.maximum(batch["weights"].sum(), 1), "tokens": tokens_in(batch)}


def make_gradients(config: Config, mesh=None) -> Callable:
    """f(trained, frozen, batch, key, totals) -> ((loss, metrics), gradients of the trained parameters), of a whole batch in
    `training.accumulate` microbatches. The metrics include the model's `statistics`, summed over the batch."""
    value_and_grad = jax.value_and_grad(make_loss(config, mesh), has_aux=True)
    parts = config.training.accumulate
    return value_and_grad if parts == 1 else partial(accumulated, value_and_grad, parts)


def accumulated(value_and_grad: Callable, parts: int, trained, frozen, batch: dict, key, totals: dict):
    """The sums of `value_and_grad` over the microbatches of a batch."""

    def add(sums, xs):
        part, index = xs
        at = None if key is None else jax.random.fold_in(key, index)
        return jax.tree.map(jnp.add, sums, value_and_grad(trained, frozen, part, at, totals)), None

    # Microbatch i takes rows i, i + parts, ...: so every device that has rows of the batch has rows of each microbatch.
    micro = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    first = jax.tree.map(lambda x: x[0], micro)
    shapes = jax.eval_shape(value_and_grad, trained, frozen, first, key, totals)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
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

    def norm(name: str, leaf):
        stacked = "blocks" in name.split("/")[:2]  # the encoder's are inside of "encoder"
        return jnp.sqrt(jnp.square(leaf).sum(range(1, leaf.ndim) if stacked else None))

    return {name: norm(name, leaf) for name, leaf in by_path(tree).items()}


def router_metrics(statistics: dict, tokens: dict) -> dict:
    """{name: {stack: [R, ...]}}: `router_load` and `router_drops` as shares of a layer's choices, the other statistics
    as means over the `tokens` of the update in the decoder or the encoder (`tokens_in`). If a block has several mixtures,
    their keys are 'stack/sublayer'.

    statistics: {stack: {sublayer: {name: [R, ...]}}}, summed over the tokens of the whole update. Choices are counted in
    integers, so that neither microbatches nor devices change which expert has more than its share."""
    metrics: dict = {}
    for stack, sublayers in statistics.items():
        for sublayer, layers in sublayers.items():
            path = stack if len(sublayers) == 1 else f"{stack}/{sublayer}"
            for name, value in layers.items():
                choices_R = jnp.maximum(layers["router_load"].sum(-1), 1)
                of_choice = choices_R.reshape(-1, *[1] * (value.ndim - 1))
                divisor = of_choice if name in CHOICES else tokens[encoder.stack_of(stack)]
                metrics.setdefault(name, {})[path] = value / divisor
    return metrics
