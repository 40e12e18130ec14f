"""Update rules in optax: clip -> scale -> decoupled weight decay -> learning rate.

All update rules use this chain. They differ only in how they scale the gradient; Adagrad can also clip after scaling
(see `clip_by`).
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from xfresearch.models.adapters import TRAINED
from xfresearch.models.block import matrix_paths
from xfresearch.models.model_config import ModelConfig
from xfresearch.options.run_options import OptimizerConfig
from xfresearch.runtime.errors import nearest, require
from xfresearch.runtime.trees import by_path, split
from xfresearch.sharding.letters import Axes
from xfresearch.training.hyperparameters import learning_rate

SCALINGS = {
    "adamw": lambda c, _: optax.scale_by_adam(c.beta1, c.beta2, c.epsilon),
    "lion": lambda c, _: optax.scale_by_lion(c.beta1, c.beta2),
    "adafactor": lambda c, axes: optax.chain(optax.scale_by_factored_rms(), _clipped_rms(1.0, axes)),
    "adagrad": lambda c, _: _adagrad(c.epsilon),
    "muon": lambda c, axes: _muon(c, axes),
    "sgd": lambda c, _: optax.trace(c.beta1),
}


def trainable(config: OptimizerConfig, params: dict) -> tuple[dict, dict]:
    """The trained parameters and the frozen ones, of the parameters of a model or of a tree with the same paths. If the
    model has adapters, these are trained, and the others only by a pattern."""
    adapted = any(fnmatchcase(path, TRAINED) for path in by_path(params))
    patterns = (TRAINED, *config.trainable) if adapted else config.trainable or ("*",)
    return split(params, lambda path: any(fnmatchcase(path, pattern) for pattern in patterns))


def require_trainable(config: OptimizerConfig, params: dict) -> None:
    """Raises UserError if a pattern of config.trainable matches no parameter."""
    _require_matches("optimizer.trainable", config.trainable, list(by_path(params)), "a parameter")


def require_targets(model: ModelConfig) -> None:
    """Raises UserError if there is no target of adapters, or if a pattern of the targets matches no matrix of a block."""
    if model.adapter.kind != "none":
        targets = model.adapter.targets
        require(bool(targets), "model.adapter.targets", targets, "at least one pattern")
        paths = [path for each in model.all_stacks for path in matrix_paths(each)]
        _require_matches("model.adapter.targets", targets, paths, "a matrix")


def _require_matches(key: str, patterns: tuple[str, ...], paths: list[str], what: str) -> None:
    for pattern in patterns:
        allowed = f"patterns that each match {what}; {pattern!r} matches none of {', '.join(paths)}"
        matches = any(fnmatchcase(path, pattern) for path in paths)
        require(matches, key, patterns, allowed + nearest(pattern, paths))


def update_rule(config: OptimizerConfig, axes: dict) -> optax.GradientTransformationExtraArgs:
    """The update rule for parameters with the tree `axes`; update(grads, state, params, step=, hyper=) reads learning rate
    and weight decay from `hyper` (hyperparameters.py). Weight decay applies to matrices, not to norms, biases or
    embeddings."""
    scaling = SCALINGS[config.kind](config, axes)
    by_tensor = config.clip_by == "tensor"
    scaled = optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip and not by_tensor else optax.identity(),
        _with_clipped_steps(scaling, config.clip, axes) if by_tensor else scaling,
    )

    def update(grads, state, params, *, step, hyper):
        steps, state = scaled.update(grads, state, params)
        rate, decay = learning_rate(config.schedule, hyper, step), hyper["weight_decay"]

        def move(step, leaf, each: Axes):
            decayed = step + decay.astype(leaf.dtype) * leaf if each.matrix else step
            return -rate.astype(decayed.dtype) * decayed

        return jax.tree.map(move, steps, params, axes), state

    return optax.GradientTransformationExtraArgs(scaled.init, update)


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
        norm = jnp.sqrt(jnp.square(g).sum(_within_layer(axes), keepdims=True))
        return step * clip / jnp.maximum(norm, clip)

    def update(grads, state, params=None):
        steps, state = scaling.update(grads, state, params)
        return jax.tree.map(clip_step, steps, grads, axes), state

    return optax.GradientTransformation(scaling.init, update)


def _clipped_rms(clip: float, axes: dict) -> optax.GradientTransformation:
    """Each tensor's step, multiplied by min(1, clip / its root mean square) (Shazeer & Stern 2018, sec. 6). Each layer of a
    stack is its own tensor."""

    def clip_step(step, axes: Axes):
        rms = jnp.sqrt(jnp.square(step).mean(_within_layer(axes), keepdims=True))
        return step / jnp.maximum(1.0, rms / clip)

    return optax.stateless(lambda steps, params=None: jax.tree.map(clip_step, steps, axes))


def _within_layer(axes: Axes) -> tuple[int, ...]:
    """The dimensions of a parameter without that of the layers of a stack."""
    return tuple(range(axes.letters.startswith("N"), len(axes.letters)))


def _muon(config: OptimizerConfig, axes: dict):
    """Muon (Jordan et al. 2024) on matrices, with a momentum of 0.95, and Adam with Nesterov momentum (Dozat 2016) on all
    other parameters: optax.contrib.muon has it in both.

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
