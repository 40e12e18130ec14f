"""Folders and outputs recorded from `transformers` (record.py): our logits, exports and training steps equal them."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import xfresearch as xf
from tests.contracts.losses import batch_of
from tests.contracts.variants import change, in_float64
from tests.interop.folders import assert_same_tensors, choices, greedy
from tests.interop.record import CONTINUATION, MODELS, PROMPT, RATE, RECORDED, STEPS, TRAINED, batches
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.options.run_options import OptimizerConfig
from xfresearch.runtime.trees import path_name
from xfresearch.training.hyperparameters import hyper_of
from xfresearch.training.program import Program


@pytest.fixture(scope="module", params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(name) -> dict:
    """The recorded outputs of `transformers`."""
    return load_file(RECORDED / f"{name}.safetensors")


@pytest.fixture(scope="module")
def lm(name):
    return xf.load(RECORDED / name)


def test_logits_equal_those_of_transformers(lm, expected):
    assert 0.5 < np.abs(expected["logits"]).max() < 50
    assert relative_error(lm(expected["tokens"]), expected["logits"]) < TOLERANCE["float32"]


def test_greedy_continuation_equals_that_of_transformers(lm, expected):
    assert np.array_equal(greedy(lm, expected["tokens"][:, :PROMPT], CONTINUATION), expected["greedy"])


@pytest.mark.parametrize("name", [name for name, (_, sizes) in MODELS.items() if "num_experts_per_tok" in sizes])
def test_the_router_chooses_the_same_experts_as_in_transformers(name):
    lm = xf.load(RECORDED / name)
    expected = load_file(RECORDED / f"{name}.safetensors")
    k = expected["choices"].shape[-1]
    assert np.array_equal(choices(lm, expected["tokens"], k), expected["choices"])


def test_export_writes_the_same_folder(lm, name, expected, tmp_path):
    lm.export_hf(tmp_path / name)
    assert_same_tensors(tmp_path / name, RECORDED / name)
    again = xf.load(tmp_path / name)
    assert np.array_equal(again(expected["tokens"]), lm(expected["tokens"]))


def trained(lm, batches_NBL, balance: float):
    """The parameters after one step of SGD in float64 for each batch, and the loss before each step."""
    model = change(in_float64(lm.config), "blocks.main.feed_forward.moe.z_loss", 0.0)
    model = change(model, "blocks.main.feed_forward.moe.balance_loss", balance)
    rule = {"kind": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip": 0.0}
    sgd = OptimizerConfig(**rule, learning_rate=RATE, schedule="constant", warmup=0)
    run = replace(lm.run, model=model, optimizer=sgd, steps=STEPS)
    program = Program(run)
    step = jax.jit(program.update)
    losses = []
    params = jax.tree.map(lambda leaf: leaf.astype("float64"), lm.params)
    state = program.start(params, hyper_of(run))
    for tokens_BL in batches_NBL:
        state, metrics = step(state, batch_of(tokens_BL))
        losses.append(metrics["loss"] + metrics["balance_loss"])
    return state["params"], losses


@pytest.mark.parametrize("name", TRAINED)
def test_training_mixtral_changes_weights_as_in_transformers(name, x64):
    """Compares the change of every weight, including the router's. `transformers` sums the balance loss over a token's
    choices, we average it."""
    arguments, _ = TRAINED[name]
    folder = RECORDED / "trained" / name
    before = xf.load(folder / "before")
    after = xf.load(folder / "after").params
    balance = arguments["num_experts_per_tok"] * arguments["router_aux_loss_coef"]
    result, losses = trained(before, batches(name), balance)
    assert relative_error(losses, load_file(folder / "losses.safetensors")["losses"]) < TOLERANCE["float32"]
    ours, theirs = (jax.tree.map(lambda new, old: new - old, params, before.params) for params in (result, after))
    for (path, change_), expected in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        assert relative_error(change_, expected) < TOLERANCE["float32"], path_name(path)
