"""The training loss of a model as a function of its parameters, as in an update (training/step.py)."""

import jax
import numpy as np

from xfresearch.kernels import lambda_scan
from xfresearch.models.model_config import ModelConfig
from xfresearch.options.run_options import DataConfig, TrainingConfig
from xfresearch.run_config.config import Config
from xfresearch.training import step

PLAIN = {"layers": "unroll", "attention_kernel": "plain", "expert_kernel": "ragged"}


def batch_of(tokens_BL, segments_BL=None, positions_BL=None, weights_BL=None) -> dict:
    """A batch whose targets are `tokens_BL` shifted by one. Without segments, each row is one document."""
    inputs_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
    shape = inputs_BL.shape
    return {
        "tokens": inputs_BL,
        "targets": targets_BL,
        "weights": np.ones(shape) if weights_BL is None else weights_BL,
        "segments": np.ones(shape, np.int32) if segments_BL is None else segments_BL,
        "positions": np.broadcast_to(np.arange(shape[1]), shape) if positions_BL is None else positions_BL,
    }


def loss_of(config: ModelConfig, batch: dict, key=None, packing: str = "stream", **training):
    """loss(params) -> scalar, auxiliary losses included. key: for dropout. training: fields of TrainingConfig."""
    run = Config(
        model=config,
        data=DataConfig(packing=packing),
        training=TrainingConfig(**{**PLAIN, **training}),
    )
    loss = step.make_loss(run)
    totals = {"weights": batch["weights"].sum(), "tokens": step.tokens_in(batch)}
    return lambda params: loss(params, {}, batch, key, totals)[0]


_CROSS_ENTROPY = jax.jit(step.linear_cross_entropy, static_argnames=("z_loss", "rows", "mesh"))
_LAMBDA_SCAN = jax.jit(lambda_scan.lambda_scan, static_argnames="chunk")


def compile_loops_once(monkeypatch) -> None:
    """Jits the two functions in which the unrolled model has loops (without expert kernels), so that all variants share
    one compilation. Outside of jit, JAX compiles a loop again in every call."""
    monkeypatch.setattr(step, "linear_cross_entropy", _CROSS_ENTROPY)
    monkeypatch.setattr(lambda_scan, "lambda_scan", _LAMBDA_SCAN)
