"""The numbers of a run that its compiled program takes as data: runs that differ only in these share one program."""

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from xfresearch.options.run_options import DataConfig, LogConfig, OptimizerConfig, TrainingConfig
from xfresearch.run_config.config import Config
from xfresearch.training.kernel_choices import has_prefixes

OF_OPTIMIZER = ("learning_rate", "weight_decay", "warmup", "final_fraction", "decay_fraction")


def hyper_of(config: Config) -> dict:
    """{name: scalar array} of a run: seed, steps, and the numbers of its learning rate and weight decay."""
    numbers = {"seed": config.seed, "steps": config.steps}
    numbers |= {name: getattr(config.optimizer, name) for name in OF_OPTIMIZER}
    real = jnp.result_type(float)
    return {name: np.asarray(value, np.int32 if isinstance(value, int) else real) for name, value in numbers.items()}


def without_hyper(config: Config) -> Config:
    """The config with defaults for all that the program does not depend on. Equal configs have the same program."""
    defaults = OptimizerConfig()
    kept = ("model", "mesh", "batch_size", "sequence_length", "source_length")
    optimizer = replace(config.optimizer, **{name: getattr(defaults, name) for name in OF_OPTIMIZER})
    training = replace(config.training, skip_limit=TrainingConfig().skip_limit)
    objective = config.data.objective if has_prefixes(config) else DataConfig().objective  # prefixes are in its batches
    data = DataConfig(packing=config.data.packing, objective=objective)
    log = LogConfig(layer_norms=config.log.layer_norms)
    parts = {name: getattr(config, name) for name in kept} | {"training": training}
    return Config(**parts, optimizer=optimizer, data=data, log=log)


def learning_rate(schedule: str, hyper: dict, step):
    """The learning rate of update number `step` (from 0): linear warm-up from peak / warmup to the peak, then the schedule
    until hyper["steps"]."""
    peak, warmup = hyper["learning_rate"], hyper["warmup"]
    step, steps = (jnp.asarray(count, peak.dtype) for count in (step, hyper["steps"]))  # int32 / int32 is float32
    last = peak * hyper["final_fraction"]
    count, after = step - warmup, jnp.maximum(steps - warmup, 1)  # updates since the warm-up, and all that follow it
    decay = jnp.clip(jnp.round(hyper["decay_fraction"] * steps), 1, after)
    shapes = {
        "constant": lambda: 0.0,
        "cosine": lambda: (1 - jnp.cos(math.pi * _share(count, after))) / 2,
        "linear": lambda: _share(count, after),
        "wsd": lambda: _share(count - (after - decay), decay),
    }
    rising = peak * jnp.minimum((step + 1) / jnp.maximum(warmup, 1), 1.0)
    return jnp.where(step < warmup, rising, peak + (last - peak) * shapes[schedule]())


def _share(count, of):
    return jnp.clip(count / of, 0.0, 1.0)
