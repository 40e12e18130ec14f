"""Adaptive spans (Sukhbaatar et al. 2019a): the mask of the paper's code, the loss, the bounds, and trimming."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import capture, forward
from tests.contracts.two_stacks import made
from tests.contracts.variants import in_float64, model, random_params, tokens_for
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import transformer
from xfresearch.models.context import AUTO, Source
from xfresearch.models.counting import count_flops
from xfresearch.models.reach import trained_reach
from xfresearch.training.step import within_bounds

LENGTH = 256


def adaptive(**changes):
    changes = {"span": "adaptive", "span_ramp": 4, **changes}
    config = model({f"blocks.main.attention.{name}": value for name, value in changes.items()} | {"max_length": LENGTH})
    return in_float64(config)


def with_spans(config, fractions):
    params = random_params(config)
    params["blocks"]["main"]["attention"]["span"]["fraction"] = jnp.asarray(fractions)
    return params


def weights(config, params, tokens_BL):
    return capture(config, params, tokens_BL, [f"blocks.0.attention.{name}" for name in ("weights", "query", "key")])


def test_masking_before_the_softmax_equals_masking_after_it_with_renormalisation(x64):
    """The published code masks the weights after the softmax and divides by their sum; ours adds log m before it."""
    config = adaptive(window=8)
    params = with_spans(config, [[0.0, 0.2, 0.5, 1.0]] * 2)
    tokens_BL = tokens_for(config)
    w_BHLS, q_BLHK, k_BLHK = weights(config, params, tokens_BL)
    logits = np.einsum("blhk,bshk->bhls", q_BLHK, k_BLHK) / np.sqrt(8)
    d = np.arange(8)[:, None] - np.arange(8)
    softmax = np.exp(logits) * (d >= 0)
    softmax /= softmax.sum(-1, keepdims=True)
    m = np.clip((np.array([0.0, 0.2, 0.5, 1.0])[:, None, None] * 8 - d) / 4 + 1, 0, 1)
    masked = softmax * m
    assert relative_error(w_BHLS, masked / masked.sum(-1, keepdims=True)) < TOLERANCE["float64"]
    assert np.count_nonzero(np.asarray(w_BHLS[0, 0, 7])) == 4  # with span 0, only the ramp is left: x = 0, 1, 2, 3


@pytest.mark.covers("blocks.main.attention.span_ramp")
def test_gradient_of_the_span_equals_finite_differences(x64):
    config = adaptive(window=8)
    tokens_BL = tokens_for(config)
    at = jnp.asarray([[0.13, 0.31, 0.57, 0.83]] * 2)

    def loss(fractions):
        logits, losses = forward(config, with_spans(config, fractions), tokens_BL)
        return jnp.sin(logits).sum() + losses["span_loss"].sum()

    gradient = jax.grad(loss)(at)
    step = 1e-6
    assert np.isfinite(gradient).all()
    for place in [(0, 0), (1, 2)]:
        shift = jnp.zeros_like(at).at[place].set(step)
        numeric = (loss(at + shift) - loss(at - shift)) / (2 * step)
        assert gradient[place] == pytest.approx(float(numeric), rel=1e-5)


def test_span_loss_is_the_mean_span_in_tokens(x64):
    config = adaptive(span_loss=0.01)
    _, losses = forward(config, with_spans(config, [[0.0, 0.5, 0.5, 1.0], [0.0] * 4]), tokens_for(config))
    np.testing.assert_allclose(losses["span_loss"], 8 * 0.01 * 256 * 0.5)  # 8 tokens; the spans of the second layer are 0


def test_training_keeps_spans_within_0_and_1(x64):
    config = adaptive()
    params = with_spans(config, [[-0.5, 0.2, 1.0, 1.5]] * 2)
    moved = within_bounds(params, transformer.axes(config))
    np.testing.assert_allclose(moved["blocks"]["main"]["attention"]["span"]["fraction"], [[0.0, 0.2, 1.0, 1.0]] * 2)
    np.testing.assert_array_equal(moved["embed"]["table"], params["embed"]["table"])


@pytest.mark.parametrize("sees_itself", [True, False])
def test_a_trimmed_model_has_equal_logits_and_fewer_flops(sees_itself, x64):
    config = adaptive(sees_itself=sees_itself, memory_slots=3)
    params = with_spans(config, [[0.0, 0.05, 0.1, 0.1], [0.0, 0.02, 0.0, 0.1]])
    reach = trained_reach(config, params)
    # A span of 0.1 * 256 = 25.6 tokens and a ramp of 4: m is 0 from 30 steps back on. The reach is a multiple of 64.
    assert reach == (("main", 64),)
    executions = [replace(AUTO, reach=reach), AUTO]
    tokens_BL = tokens_for(config, length=LENGTH)
    runs = [lambda p, each=each: forward(config, p, tokens_BL, execution=each)[0] for each in executions]
    assert relative_error(*(run(params) for run in runs)) < TOLERANCE["float64"]
    flops = [count_flops(run, params) for run in runs]
    # FLOPs of one more key: layers * 4 H K * sequences * queries.
    mixing = 2 * 4 * 4 * 8 * 2 * LENGTH
    assert flops[1] - flops[0] == mixing * (LENGTH - 2 * 64)


def test_trimming_leaves_an_encoder_with_a_block_of_the_same_name_as_it_is(x64):
    spans = {"blocks.main.attention.span": "adaptive", "blocks.main.attention.span_ramp": 4, "max_length": LENGTH}
    config = in_float64(made(spans | {"stacks.encoder.causal": True, "stacks.encoder.max_length": LENGTH}))
    params = with_spans(config, [[0.0] * 4] * 2)
    source = Source(tokens_for(config, length=LENGTH))
    executions = [replace(AUTO, reach=trained_reach(config, params)), AUTO]
    trimmed, whole = (
        capture(config, params, tokens_for(config), ["encoder.final"], source=source, execution=each)[0]
        for each in executions
    )
    assert relative_error(trimmed, whole) < TOLERANCE["float64"]


def test_a_span_as_long_as_the_sequence_is_not_trimmed(x64):
    config = adaptive()
    assert trained_reach(config, with_spans(config, [[0.1, 0.2, 0.3, 1.0]] * 2)) == ()
