"""Folders that `transformers` wrote, and what it said of them (record.py): read, run, written again, and trained."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import xfresearch as xf
from tests.contracts.losses import batch_of
from tests.contracts.variants import change, in_float64
from tests.interop.folders import assert_same_tensors, choices, greedy
from tests.interop.record import CONTINUATION, MODELS, PROMPT, RATE, RECORDED, STEPS, TRAINED, batches
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.config.run import OptimizerConfig
from xfresearch.training.optimizer import make_optimizer
from xfresearch.training.step import make_train_step
from xfresearch.trees import path_name


@pytest.fixture(scope="module", params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def said(name) -> dict:
    return load_file(RECORDED / f"{name}.safetensors")


@pytest.fixture(scope="module")
def lm(name):
    return xf.load(RECORDED / name)


def test_logits_are_those_of_transformers(lm, said):
    assert 0.5 < np.abs(said["logits"]).max() < 50
    assert relative_error(lm(said["tokens"]), said["logits"]) < TOLERANCE["float32"]


def test_greedy_continuation_is_that_of_transformers(lm, said):
    assert np.array_equal(greedy(lm, said["tokens"][:, :PROMPT], CONTINUATION), said["greedy"])


def test_router_chooses_the_experts_that_it_does_in_transformers():
    lm, said = xf.load(RECORDED / "mixtral"), load_file(RECORDED / "mixtral.safetensors")
    assert np.array_equal(choices(lm, said["tokens"], said["choices"].shape[-1]), said["choices"])


def test_export_writes_the_same_folder(lm, name, said, tmp_path):
    lm.export_hf(tmp_path / name)
    assert_same_tensors(tmp_path / name, RECORDED / name)
    again = xf.load(tmp_path / name)
    assert np.array_equal(again(said["tokens"]), lm(said["tokens"]))


def trained(lm, batches_NBL, balance: float):
    """The parameters after a step of SGD in float64 for each batch, and the losses before each."""
    model = change(in_float64(lm.config), "blocks.main.feed_forward.moe.z_loss", 0.0)
    model = change(model, "blocks.main.feed_forward.moe.balance_loss", balance)
    rule = {"kind": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip": 0.0}
    sgd = OptimizerConfig(**rule, learning_rate=RATE, schedule="constant", warmup=0)
    optimizer = make_optimizer(sgd, STEPS)
    step, losses = jax.jit(make_train_step(replace(lm.run, model=model, optimizer=sgd), optimizer)), []
    params = jax.tree.map(lambda leaf: leaf.astype("float64"), lm.params)
    state = {"params": params, "opt": optimizer.init(params), "step": jnp.int32(0), "skipped": jnp.int32(0)}
    for tokens_BL in batches_NBL:
        state, metrics = step(state, batch_of(tokens_BL))
        losses.append(metrics["loss"] + metrics["balance_loss"])
    return state["params"], losses


@pytest.mark.parametrize("name", TRAINED)
def test_trained_mixtral_is_that_of_transformers(name, x64):
    """The change of every weight, the router's too. They sum the balance loss over a token's choices, we average."""
    arguments, _ = TRAINED[name]
    folder = RECORDED / "trained" / name
    before, after = xf.load(folder / "before"), xf.load(folder / "after").params
    balance = arguments["num_experts_per_tok"] * arguments["router_aux_loss_coef"]
    found, losses = trained(before, batches(name), balance)
    assert relative_error(losses, load_file(folder / "losses.safetensors")["losses"]) < TOLERANCE["float32"]
    ours, theirs = (jax.tree.map(lambda new, old: new - old, params, before.params) for params in (found, after))
    for (path, change_), expected in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        assert relative_error(change_, expected) < TOLERANCE["float32"], path_name(path)
