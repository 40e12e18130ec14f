"""Auxiliary losses and router metrics of a model with two stacks: each is a mean over the tokens of its own stack."""


import jax
import numpy as np
import pytest

from tests.contracts.two_stacks import ENCODER, made
from tests.contracts.variants import in_float64, random_params
from tests.reference import model as reference
from tests.tolerances import TOLERANCE, relative_error
from tests.training.rules import gradients
from xfresearch.data.pairs import pair_packing
from xfresearch.data.pairs.pair_packing import Pair
from xfresearch.options.run_options import DataConfig, TrainingConfig
from xfresearch.run_config.config import Config
from xfresearch.training.step import router_metrics, tokens_in

MOE = "blocks.main.feed_forward.moe."
SPAN = "blocks.main.attention.span"
ONE_STACK = {"blocks.main.feed_forward.kind": "moe", MOE + "experts": 4, MOE + "balance_loss": 1.0, MOE + "z_loss": 0.1}
ONE_STACK |= {SPAN: "adaptive", SPAN + "_ramp": 2, SPAN + "_loss": 0.3}
# A span counts past tokens, so its encoder is causal.
MODEL = in_float64(made(ONE_STACK | {ENCODER + "causal": True} | {ENCODER + path: x for path, x in ONE_STACK.items()}))
LENGTHS = {  # (source, target) of the pairs in each row of 6 and 12 places
    "as many tokens": [[(6, 6)], [(6, 6)]],
    "a short source": [[(2, 12)], [(1, 12)]],
    "a short target": [[(6, 2)], [(6, 3)]],
    "packed": [[(2, 5), (1, 3), (2, 2)], [(4, 1), (1, 9)], [(6, 12)], [(1, 1)]],
}


def batch_of(lengths: list) -> dict:
    """A batch of drawn pairs."""
    rng = np.random.default_rng(0)
    draw = lambda count: rng.integers(0, MODEL.vocab_size, count).astype(np.int32)  # noqa: E731
    rows = [[Pair(draw(source), draw(target)) for source, target in row] for row in lengths]
    return pair_packing.batch(rows, 6, 12, start=0)


def measured(batch: dict, params: dict, parts: int = 1) -> tuple[dict, dict]:
    """Gradients and metrics of an update in `parts` microbatches."""
    config = Config(model=MODEL, data=DataConfig(packing="documents"), training=TrainingConfig(accumulate=parts))
    return jax.jit(lambda params, batch: gradients(config, params, batch, None))(params, batch)


def expected(batch: dict, params: dict) -> dict:
    """The losses by their definitions, with the sums over a sequence of the reference."""
    params, names = jax.tree.map(np.asarray, params), ("tokens", "positions", "segments")
    means = dict.fromkeys(("balance_loss", "router_z_loss", "span_loss"), 0.0)
    tokens = {"": (batch["segments"] > 0).sum(), "encoder": (batch["source_segments"] > 0).sum()}
    for row in range(len(batch["tokens"])):
        source = tuple(batch[name][row] for name in ("source", "source_positions", "source_segments"))
        _, sums = reference.model(MODEL, params, *(batch[name][row] for name in names), source=source)
        for path, value in sums.items():
            stack, _, name = path.rpartition("/")
            means[name] += value / tokens[stack]
    return means


@pytest.mark.parametrize("name", LENGTHS)
def test_each_loss_is_a_mean_over_the_tokens_of_its_stack(name, x64):
    batch, params = batch_of(LENGTHS[name]), random_params(MODEL)
    metrics = measured(batch, params)[1]
    for loss, value in expected(batch, params).items():
        assert relative_error(metrics[loss], value) < TOLERANCE["float64"], loss


def test_microbatches_of_pairs_add_up_to_the_whole_batch(x64):
    batch, params = batch_of(LENGTHS["packed"]), random_params(MODEL)
    whole, parts = measured(batch, params), measured(batch, params, 4)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, parts, whole))) < TOLERANCE["float64"]


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_do_not_weigh_a_stack(name, x64):
    """Even routers have a balance loss of 1 per layer, and spans a loss of their mean, whatever the lengths."""
    batch, flat = batch_of(LENGTHS[name]), random_params(MODEL)
    of_stacks = [flat["blocks"]["main"], flat["encoder"]["blocks"]["main"]]
    for block in of_stacks:
        block["feed_forward"]["router"]["kernel"] *= 0
    metrics = measured(batch, flat)[1]
    assert metrics["balance_loss"] == pytest.approx(MODEL.depth + MODEL.encoder.depth)
    spans = [0.3 * block["attention"]["span"]["fraction"].mean(-1).sum() for block in of_stacks]
    assert metrics["span_loss"] == pytest.approx(MODEL.max_length * spans[0] + MODEL.encoder.max_length * spans[1])
    of_routers = router_metrics(metrics["statistics"], tokens_in(batch))
    for stack in ("main", "encoder/main"):
        np.testing.assert_allclose(of_routers["router_mass"][stack].sum(-1), 1)
        np.testing.assert_allclose(of_routers["router_entropy"][stack], np.log(4))
