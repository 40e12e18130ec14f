"""Writes a config's model for PyTorch (torch_peer.py), and checks that both models have equal losses."""

import json
from pathlib import Path

import jax
import numpy as np

from xfresearch.interop import exporting
from xfresearch.interop.families import get_family
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.model_config import with_dtype
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError, require
from xfresearch.sharding.mesh import make_mesh
from xfresearch.training.hyperparameters import hyper_of, learning_rate
from xfresearch.training.program import shared_program
from xfresearch.training.timing import random_batch

FAMILIES = ("gpt2", "llama")
# What the PyTorch model computes, beside its architecture.
ONLY = {
    "optimizer.kind": "adamw",
    "optimizer.clip_by": "global",
    "optimizer.trainable": (),
    "training.accumulate": 1,
    "training.z_loss": 0.0,
    "training.ema": 0.0,
    "training.on_nonfinite": "stop",
    "data.packing": "stream",
}
# Keys of config.json that must have these values, if the folder has them.
PLAIN = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0, "rope_scaling": None}
PLAIN |= {"attention_bias": False, "mlp_bias": False}
CHECKED_TOKENS = 1024
TOLERANCE = 1e-4  # of the loss of a token in float32, relative to the largest one
MOVED = {"float32": 1e-3, "bfloat16": 2e-2}  # of the mean loss of an update in the dtype that is timed


def write(config: Config, folder: Path, updates: int) -> None:
    """Writes what torch_peer.py reads: the initial parameters, the batch, and the learning rates of the updates. Raises
    UserError, which names the option, if the PyTorch model cannot express the config."""
    family = require_expressible(config)
    model, hyper = config.model, hyper_of(config)
    params = shared_program(config, make_mesh(config)).jit_init(hyper)["params"]
    lm = LanguageModel(model, params, None, config)
    exporting.export(lm, folder, family, "float32", shard_bytes=2**60)
    batch = random_batch(config)
    np.savez(folder / "batch.npz", tokens=batch["tokens"], targets=batch["targets"])
    optimizer = config.optimizer
    settings = {name: getattr(optimizer, name) for name in ("beta1", "beta2", "epsilon", "weight_decay", "clip")}
    settings["rates"] = [float(learning_rate(optimizer.schedule, hyper, step)) for step in range(updates)]
    settings |= {"dtype": model.dtype, "check_rows": check_rows(config)}
    (folder / "peer.json").write_text(json.dumps(settings))
    np.save(folder / "expected.npy", losses(lm, {name: rows[: check_rows(config)] for name, rows in batch.items()}))


def require_expressible(config: Config) -> str:
    """The family of the model, GPT-2 or Llama. Raises UserError if the PyTorch model lacks an option of the config."""
    values = values_of(config)
    for path, value in ONLY.items():
        require(values[path] == value, path, values[path], f"{value!r} with --against=torch")
    require(config.model.dtype != "float64", "model.dtype", "float64", "float32 or bfloat16 with --against=torch")
    lacking = {}
    for name in FAMILIES:
        try:
            lacking[name] = exporting.missing(get_family(name), config.model)
        except UserError:
            continue
        if not lacking[name]:
            _require_plain(exporting.write_config(get_family(name), config.model))
            return name
    why = exporting.reason(lacking) if lacking else "the model is neither"
    raise UserError(f"--against=torch is not allowed: the model in PyTorch is a GPT-2 or a Llama, and {why}")


def _require_plain(keys: dict) -> None:
    for key, value in PLAIN.items():
        given = keys.get(key, value)
        if given != value:
            raise UserError(
                f"--against=torch is not allowed: the model's {key} is {given!r}, and must be {value!r} there"
            )


def values_of(config: Config) -> dict:
    """The values of the options in ONLY by their path."""
    return {path: getattr(getattr(config, path.split(".")[0]), path.split(".")[1]) for path in ONLY}


def check_rows(config: Config) -> int:
    return min(config.batch_size, max(1, CHECKED_TOKENS // config.sequence_length))


def losses(lm: LanguageModel, batch: dict) -> np.ndarray:
    """The loss of every token [rows, L], in float32 and with products of full precision."""
    model = with_dtype(lm.config, "float32")
    with jax.default_matmul_precision("highest"):
        logits_BLV = np.asarray(LanguageModel(model, lm.params, None, lm.run)(batch["tokens"]))
    top_BL1 = logits_BLV.max(-1, keepdims=True)
    sums_BL = np.log(np.exp(logits_BLV - top_BL1).sum(-1)) + top_BL1[..., 0]
    return sums_BL - np.take_along_axis(logits_BLV, batch["targets"][..., None], -1)[..., 0]


def tokens_differ(folder: Path) -> str:
    """Why the two models are not the same: losses of tokens, before the first update; '' if they are equal."""
    expected_BL, losses_BL = np.load(folder / "expected.npy"), np.load(folder / "losses.npy")
    apart = float(np.abs(expected_BL - losses_BL).max() / np.abs(expected_BL).max())
    return "" if apart <= TOLERANCE else f"losses of tokens differ by {apart:.1e}, allowed are {TOLERANCE:.0e}"


def updates_differ(theirs: list[float], ours: list[float], dtype: str) -> str:
    """The same for the mean losses of the first two updates, in the dtype that is timed."""
    apart = max(abs(a - b) / abs(b) for a, b in zip(theirs[:2], ours[:2], strict=True))
    return "" if apart <= MOVED[dtype] else f"losses of updates differ by {apart:.1e}, allowed are {MOVED[dtype]:.0e}"
