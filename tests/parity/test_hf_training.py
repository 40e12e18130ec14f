"""Training: gradients equal those of PyTorch, and a model trained here has the same logits in `transformers`."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.contracts.variants import ROOT, change
from tests.parity.weights import MISSING
from tests.tolerances import TOLERANCE, relative_error

pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.parity.hf_draws import DRAWS, LENGTH, ROUNDS, Draw  # noqa: E402
from xfresearch.runtime.trees import path_name  # noqa: E402
from xfresearch.train import main as train_main  # noqa: E402
from xfresearch.training.step import make_loss  # noqa: E402

pytestmark = pytest.mark.parity
DTYPES = ["float32", "float64"]


def gradients(lm, tokens_BL) -> tuple[float, dict]:
    """Our mean training loss and its gradients by path, without the balance and z losses of experts."""
    model = lm.config
    for name, block in model.blocks.items():
        if block.feed_forward.kind == "moe":
            model = change(model, f"blocks.{name}.feed_forward.moe.balance", "none")
            model = change(model, f"blocks.{name}.feed_forward.moe.z_loss", 0.0)
    inputs_BL = tokens_BL[:, :-1]
    targets_BL = tokens_BL[:, 1:]
    positions_BL = np.broadcast_to(np.arange(inputs_BL.shape[1]), inputs_BL.shape)
    batch = {
        "tokens": inputs_BL,
        "targets": targets_BL,
        "positions": positions_BL,
        "weights": np.ones(targets_BL.shape),
    }
    totals = {"weights": targets_BL.size, "tokens": {"": targets_BL.size}}
    loss = jax.value_and_grad(make_loss(replace(lm.run, model=model)), has_aux=True)
    (value, _), result = jax.jit(loss)(lm.params, {}, batch, None, totals)
    return float(value), {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(result)}


def is_zero(path: str, config) -> bool:
    """Whether a gradient is zero except for rounding: without RoPE, a key bias shifts all logits of a query equally."""
    return path.endswith("key/bias") and config.model_type == "gpt2"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_gradients_equal_those_of_pytorch(name, number, dtype, parity, tmp_path):
    """For every parameter. PyTorch's gradients are saved as a folder and imported like weights."""
    config = DRAWS[name](Draw(number))
    hf_torch.write_random(config, tmp_path / "weights", seed=number, dtype=dtype)
    tokens_BL = np.random.default_rng(number).integers(0, config.vocab_size, (3, LENGTH))
    expected_loss = hf_torch.write_gradients(tmp_path / "weights", tokens_BL, dtype, tmp_path / "gradients")
    lm = xf.load(tmp_path / "weights")
    expected = xf.load(tmp_path / "gradients").params
    loss, result = gradients(lm, tokens_BL)
    assert abs(loss - expected_loss) < TOLERANCE[dtype] * loss
    expected = {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(expected)}
    assert result.keys() == expected.keys()
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for path, leaf in expected.items():
        if is_zero(path, config):
            assert np.abs(result[path]).max() < TOLERANCE[dtype] * largest
        else:
            parity("transformers", f"{name}, gradients", dtype, relative_error(result[path], leaf))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral_8x7b"])
def test_a_model_trained_here_has_the_same_logits_in_transformers(name, parity, tmp_path):
    flags = {
        "steps": 8,
        "data.cache_dir": tmp_path / "cache",
        "log.tracker": "jsonl",
        "evaluation.final_sequences": 8,
    }
    overrides = [f"--config.{key}={value}" for key, value in flags.items()]
    train_main(["--config", f"{ROOT}/configs/{name}.py:tiny", "--workdir", str(tmp_path / "run"), *overrides])
    lm = xf.load(tmp_path / "run")
    lm.export_hf(tmp_path / "out")
    tokens_BL = np.random.default_rng(0).integers(0, lm.config.vocab_size, (2, LENGTH))
    expected = hf_torch.logits(tmp_path / "out", tokens_BL, "float32")
    parity("transformers", f"{name}, trained here", "float32", relative_error(lm(tokens_BL), expected))
