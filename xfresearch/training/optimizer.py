"""Learning-rate schedules and update rules in optax: clip -> scale -> decoupled weight decay -> learning rate.

All update rules use this chain. They differ only in how they scale the gradient; Adagrad can also clip after scaling
(see `clip_by`).
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from xfresearch.config.run import Config, OptimizerConfig
from xfresearch.errors import nearest, require
from xfresearch.models import transformer
from xfresearch.sharding.letters import Axes
from xfresearch.trees import by_path, split


def make_schedule(config: OptimizerConfig, steps: int):
    """Learning rate as a function of the step: linear warm-up from 0, then the config's schedule until `steps`."""
    peak = config.learning_rate
    last = peak * config.final_fraction
    after = steps - config.warmup  # steps after the warm-up
    decay = max(round(config.decay_fraction * steps), 1)
    shapes = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, max(after, 1), config.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, last, max(after, 1)),
        "wsd": lambda: optax.linear_schedule(peak, last, decay, transition_begin=max(after - decay, 0)),
    }
    warmup = optax.linear_schedule(peak / max(config.warmup, 1), peak, max(config.warmup - 1, 1))
    return optax.join_schedules([warmup, shapes[config.schedule]()], [config.warmup])


SCALINGS = {
    "adamw": lambda c, _: optax.scale_by_adam(c.beta1, c.beta2, c.epsilon),
    "lion": lambda c, _: optax.scale_by_lion(c.beta1, c.beta2),
    "adafactor": lambda c, _: optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
    "adagrad": lambda c, _: _adagrad(c.epsilon),
    "muon": lambda c, axes: _muon(c, axes),
    "sgd": lambda c, _: optax.trace(c.beta1),
}


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """The update rule of a run, for the parameters that it trains. Raises UserError if a pattern of
    config.optimizer.trainable matches no parameter."""
    axes = transformer.axes(config.model)
    _check_trainable(config.optimizer, list(by_path(axes)))
    return update_rule(config.optimizer, config.steps, trainable(config.optimizer, axes)[0])


def trainable(config: OptimizerConfig, params: dict) -> tuple[dict, dict]:
    """The trained parameters and the frozen ones, of the parameters of a model or of a tree with the same paths."""
    patterns = config.trainable or ("*",)
    return split(params, lambda path: any(fnmatchcase(path, pattern) for pattern in patterns))


def _check_trainable(config: OptimizerConfig, paths: list[str]) -> None:
    for pattern in config.trainable:
        allowed = f"patterns that each match a parameter; {pattern!r} matches none of {', '.join(paths)}"
        matches = any(fnmatchcase(path, pattern) for path in paths)
        require(matches, "optimizer.trainable", config.trainable, allowed + nearest(pattern, paths))


def update_rule(config: OptimizerConfig, steps: int, axes: dict) -> optax.GradientTransformation:
    """The update rule for parameters with the tree `axes`. Weight decay applies to matrices, not to norms, biases
    or embeddings."""
    scaling = SCALINGS[config.kind](config, axes)
    by_tensor = config.clip_by == "tensor"
    return optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip and not by_tensor else optax.identity(),
        _with_clipped_steps(scaling, config.clip, axes) if by_tensor else scaling,
        optax.add_decayed_weights(config.weight_decay, mask=jax.tree.map(lambda each: each.matrix, axes)),
        optax.scale_by_learning_rate(make_schedule(config, steps)),
    )


class SumOfSquares(NamedTuple):
    """Adagrad's state."""

    sum: optax.Params


def _adagrad(epsilon: float) -> optax.GradientTransformation:
    """g / (sqrt(sum of all g^2 so far) + epsilon) (Duchi et al. 2011, fig. 1). Optax has epsilon inside the root."""

    def update(grads, state, params=None):
        sums = jax.tree.map(lambda total, g: total + jnp.square(g), state.sum, grads)
        steps = jax.tree.map(lambda g, total: jnp.where(total > 0, g / (jnp.sqrt(total) + epsilon), 0), grads, sums)
        return steps, SumOfSquares(sums)

    return optax.GradientTransformation(lambda params: SumOfSquares(jax.tree.map(jnp.zeros_like, params)), update)


def _with_clipped_steps(scaling: optax.GradientTransformation, clip: float, axes: dict) -> optax.GradientTransformation:
    """`scaling`, with each tensor's step multiplied by min(1, clip / |g|), where g is the tensor's gradient (Sukhbaatar
    et al. 2019, their code). The state of `scaling` gets the unclipped g. Each layer of a stack has its own norm."""

    def clip_step(step, g, axes: Axes):
        within_layer = tuple(range(axes.letters.startswith("N"), g.ndim))
        norm = jnp.sqrt(jnp.square(g).sum(within_layer, keepdims=True))
        return step * clip / jnp.maximum(norm, clip)

    def update(grads, state, params=None):
        steps, state = scaling.update(grads, state, params)
        return jax.tree.map(clip_step, steps, grads, axes), state

    return optax.GradientTransformation(scaling.init, update)


def _muon(config: OptimizerConfig, axes: dict):
    """Muon (Jordan et al. 2024) on matrices, Adam on all other parameters.

    Muon's updates are scaled to a root mean square of 0.2, so that one learning rate suits both (Liu et al. 2025, sec.
    2.2). optax.contrib.muon applies its own learning rate with a minus sign; -1 cancels it.
    """
    return optax.contrib.muon(
        learning_rate=-1.0,
        beta=0.95,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.epsilon,
        muon_weight_dimension_numbers=lambda _: jax.tree.map(_dimension_numbers, axes),
        consistent_rms=0.2,
    )


def _dimension_numbers(axes: Axes):
    if not axes.matrix:
        return None
    dimensions = [tuple(axes.letters.index(letter) for letter in side) for side in (axes.inputs, axes.outputs)]
    return optax.contrib.MuonDimensionNumbers(*dimensions)
