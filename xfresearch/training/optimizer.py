"""Learning-rate schedules and update rules of optax: clip -> scale -> decoupled weight decay -> learning rate.

One chain serves every rule, so that they differ in nothing but the scaling of the gradient (and, for Adagrad, in where its
clip stands: `clip_by`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from xfresearch.config.run import Config, OptimizerConfig
from xfresearch.models import transformer
from xfresearch.sharding.letters import Axes


def make_schedule(config: OptimizerConfig, steps: int):
    """Learning rate as a function of the step: linear warm-up from 0, then the config's shape until `steps`."""
    peak, last, after = config.learning_rate, config.learning_rate * config.final_fraction, steps - config.warmup
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
    """The update rule of a run."""
    return update_rule(config.optimizer, config.steps, transformer.axes(config.model))


def update_rule(config: OptimizerConfig, steps: int, axes: dict) -> optax.GradientTransformation:
    """The update rule of parameters whose letters are the tree `axes`. Weight decay acts on matrices and never on norms,
    biases and embeddings."""
    scaling, by_tensor = SCALINGS[config.kind](config, axes), config.clip_by == "tensor"
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
    """g / (sqrt(sum of all g^2 so far) + epsilon) (Duchi et al. 2011, fig. 1). Of optax's own, epsilon is in the root."""

    def update(grads, state, params=None):
        sums = jax.tree.map(lambda total, g: total + jnp.square(g), state.sum, grads)
        steps = jax.tree.map(lambda g, total: jnp.where(total > 0, g / (jnp.sqrt(total) + epsilon), 0), grads, sums)
        return steps, SumOfSquares(sums)

    return optax.GradientTransformation(lambda params: SumOfSquares(jax.tree.map(jnp.zeros_like, params)), update)


def _with_clipped_steps(scaling: optax.GradientTransformation, clip: float, axes: dict) -> optax.GradientTransformation:
    """`scaling`, each tensor's step times min(1, clip / |g|), where g is the tensor's gradient (Sukhbaatar et al. 2019,
    their code). The state of `scaling` sees g unclipped. Layers that are stacked have a norm each."""

    def shorten(step, g, axes: Axes):
        within = tuple(range(axes.letters.startswith("N"), g.ndim))
        norm = jnp.sqrt(jnp.square(g).sum(within, keepdims=True))
        return step * clip / jnp.maximum(norm, clip)

    def update(grads, state, params=None):
        steps, state = scaling.update(grads, state, params)
        return jax.tree.map(shorten, steps, grads, axes), state

    return optax.GradientTransformation(scaling.init, update)


def _muon(config: OptimizerConfig, axes: dict):
    """Muon (Jordan et al. 2024) on matrices, Adam on the rest, both scaled so that one learning rate suits both:
    updates have a root mean square of 0.2 (Liu et al. 2025, sec. 2.2). A learning rate of -1 leaves the sign alone."""
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
    positions = [tuple(axes.letters.index(letter) for letter in side) for side in (axes.inputs, axes.outputs)]
    return optax.contrib.MuonDimensionNumbers(*positions)
