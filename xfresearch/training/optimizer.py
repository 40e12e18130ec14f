"""Learning-rate schedules and update rules, all of optax: clip -> scale -> decoupled weight decay -> learning rate.

One chain serves every rule, so that they differ in nothing but the scaling of the gradient.
"""

import jax
import optax

from xfresearch.config import OptimizerConfig
from xfresearch.models.axes import Axes, tree_axes


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
    "adamw": lambda c: optax.scale_by_adam(c.beta1, c.beta2, c.epsilon),
    "lion": lambda c: optax.scale_by_lion(c.beta1, c.beta2),
    "adafactor": lambda c: optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
    "adagrad": lambda c: optax.scale_by_rss(initial_accumulator_value=0.0, eps=c.epsilon),
    "muon": lambda c: _muon(c),
    "sgd": lambda c: optax.trace(c.beta1),
}


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The update rule. Weight decay acts on matrices (models/axes.py) and never on norms, biases and embeddings."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
        SCALINGS[config.kind](config),
        optax.add_decayed_weights(config.weight_decay, mask=_matrices),
        optax.scale_by_learning_rate(make_schedule(config, steps)),
    )


def _matrices(params):
    return jax.tree.map(lambda axes: axes.matrix, tree_axes(params))


def _muon(config: OptimizerConfig):
    """Muon (Jordan et al. 2024) on matrices, Adam on the rest, both scaled so that one learning rate suits both:
    updates have a root mean square of 0.2 (Liu et al. 2025, sec. 2.2). A learning rate of -1 leaves the sign alone."""
    return optax.contrib.muon(
        learning_rate=-1.0,
        beta=0.95,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.epsilon,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(_dimension_numbers, tree_axes(params)),
        consistent_rms=0.2,
    )


def _dimension_numbers(axes: Axes):
    if not axes.matrix:
        return None
    positions = [tuple(axes.letters.index(letter) for letter in side) for side in (axes.inputs, axes.outputs)]
    return optax.contrib.MuonDimensionNumbers(*positions)
