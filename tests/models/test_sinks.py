"""Attention sinks: a term in the softmax's denominator is a persistent slot whose value is zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import capture, forward
from tests.contracts.variants import in_float64, model, random_params, tokens_for
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.runtime.errors import UserError

A = "blocks.main.attention."


def with_sink(kind: str, **changes):
    return in_float64(model({A + "sink": kind} | {A + name: value for name, value in changes.items()}))


@pytest.mark.parametrize("position", ["none", "rope"])
def test_off_by_one_is_a_slot_of_zeros(position, x64):
    sink, slots = with_sink("off_by_one", position=position), with_sink("none", position=position, memory_slots=1)
    params, tokens_BL = random_params(slots), tokens_for(slots)
    memory = jax.tree.map(jnp.zeros_like, params["blocks"]["main"]["attention"].pop("memory"))
    actual = forward(sink, params, tokens_BL)[0]
    params["blocks"]["main"]["attention"]["memory"] = memory
    assert relative_error(actual, forward(slots, params, tokens_BL)[0]) < TOLERANCE["float64"]


def test_a_learned_sink_takes_its_share_of_the_weights(x64):
    """With b the weights sum to Z / (Z + e^b), where Z is the sum without a sink."""
    plain, learned = with_sink("none"), with_sink("learned")
    params, tokens_BL = random_params(learned), tokens_for(learned)
    without = jax.tree.map(lambda leaf: leaf, params)
    b_NH = without["blocks"]["main"]["attention"].pop("sink")
    q_BLHK, k_BLHK = capture(plain, without, tokens_BL, ["blocks.0.attention.query", "blocks.0.attention.key"])
    (weights_BHLS,) = capture(learned, params, tokens_BL, ["blocks.0.attention.weights"])
    logits_BHLS = np.einsum("blhk,bshk->bhls", q_BLHK, k_BLHK) / np.sqrt(q_BLHK.shape[-1])
    Z_BHL = np.tril(np.exp(logits_BHLS)).sum(-1)
    expected = Z_BHL / (Z_BHL + np.exp(np.asarray(b_NH)[0])[:, None])
    assert relative_error(weights_BHLS.sum(-1), expected) < TOLERANCE["float64"]


def test_a_learned_sink_beside_slots_is_refused():
    with pytest.raises(UserError, match="sink='learned' .* only without memory_slots"):
        with_sink("learned", memory_slots=4)
