"""Update rules and gradients with the numbers of a config, for tests that need no run."""

import jax.numpy as jnp
import optax

from xfresearch.options.run_options import OptimizerConfig
from xfresearch.run_config.config import Config
from xfresearch.training.hyperparameters import hyper_of
from xfresearch.training.optimizer import trainable, update_rule
from xfresearch.training.step import make_gradients, totals_of


def rule_of(config: OptimizerConfig, steps: int, axes: dict) -> optax.GradientTransformation:
    """The update rule of a run of `steps` updates; its state counts them."""
    rule, hyper = update_rule(config, axes), hyper_of(Config(optimizer=config, steps=steps))

    def update(grads, state, params):
        updates, of_rule = rule.update(grads, state[1], params, step=state[0], hyper=hyper)
        return updates, (state[0] + 1, of_rule)

    return optax.GradientTransformation(lambda params: (jnp.int32(0), rule.init(params)), update)


def gradients(config: Config, params: dict, batch: dict, key) -> tuple[dict, dict]:
    """The gradients of a batch, and its metrics."""
    (_, metrics), grads = make_gradients(config)(*trainable(config.optimizer, params), batch, key, totals_of(batch))
    return grads, metrics
