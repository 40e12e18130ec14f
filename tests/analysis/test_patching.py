"""Patching: one batched program equals a loop over the definition, and planted causal places are found."""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.analysis.test_attention import planted
from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import LanguageModel, Patch, UserError, analysis
from xfresearch.analysis.patching import attribution, effects, paths
from xfresearch.analysis.sequences import Sequences

CLEAN_BL, CORRUPTED_BL = np.random.default_rng(0).integers(257, size=(2, 1, 5))
ROWS = Sequences(CLEAN_BL), Sequences(CORRUPTED_BL)
ANSWERS = (3, 4)


def metric(lm, replace=None):
    logits_BLV = lm(CORRUPTED_BL, replace=replace)
    return logits_BLV[0, -1, ANSWERS[0]] - logits_BLV[0, -1, ANSWERS[1]]


@pytest.mark.parametrize(
    "name, site",
    [
        pytest.param("gpt2", "attention.heads", marks=pytest.mark.long),
        ("moe", "feed_forward.out"),
        pytest.param("all_attention", "attention.residual", marks=pytest.mark.long),
    ],
)
def test_effects_are_those_of_one_pass_for_each_layer_and_token(name, site):
    lm = tiny_model(name)
    traced = effects(lm, *ROWS, site, ANSWERS)
    assert traced.shape == (lm.config.depth, 5)
    for layer, position in ((0, 0), (1, 2), (1, 4)):
        tap = f"blocks.{layer}.{site}"
        value = lm.capture(CLEAN_BL, tap)[tap]
        expected = metric(lm, {tap: Patch(arguments=(value,), where=np.arange(5)[None] == position)})
        assert relative_error(traced[layer, position], expected) < 10 * TOLERANCE["float32"]


def test_all_answers_and_prompts_of_a_length_share_one_program(monkeypatch):
    module = import_module("xfresearch.analysis.patching")
    lm, traces, forward = tiny_model("gpt2"), [], module.passed
    patched = lambda a, b: analysis.patching(lm, CLEAN_BL + a, CORRUPTED_BL, (a, b), ("attention.out",))  # noqa: E731
    first = patched(0, 5)
    monkeypatch.setattr(module, "passed", lambda *inputs: traces.append(inputs) or forward(*inputs))
    second = patched(1, 7)
    assert not traces
    assert first.data["corrupted"] != second.data["corrupted"]


def test_mistakes_are_one_line():
    lm, tokens = tiny_model("gpt2"), (CLEAN_BL[:, :4], CORRUPTED_BL[:, :4])  # as many tokens as heads
    with pytest.raises(UserError, match="^sites='attention.weights' is not allowed: it must have a value of each token$"):
        analysis.patching(lm, *tokens, ANSWERS, ("attention.weights",))
    with pytest.raises(UserError, match="^answers='ab' is not allowed: it must be two tokens"):
        analysis.patching(lm, *tokens, "ab")
    bare = LanguageModel(lm.config, lm.params, None, lm.run)
    with pytest.raises(UserError, match="is not allowed: this model has no tokenizer; give two ids"):
        analysis.patching(bare, *tokens, ("a", "b"))


def test_attribution_is_gradient_times_difference():
    lm = tiny_model("gpt2")
    result = attribution(lm, *ROWS, "feed_forward.out", ANSWERS)
    for layer in range(2):
        tap = f"blocks.{layer}.feed_forward.out"
        clean, corrupted = (lm.capture(each, tap)[tap] for each in (CLEAN_BL, CORRUPTED_BL))
        slope = jax.grad(lambda shift, tap=tap: metric(lm, {tap: lambda x: x + shift}))(jnp.zeros_like(clean))
        assert relative_error(result[layer], (slope * (clean - corrupted)).sum((0, 2))) < 10 * TOLERANCE["float32"]


def test_attribution_is_exact_for_what_the_last_layer_writes():
    """Without a final norm, the logits are linear in the last output. The exact effects are differences between a program of
    one prompt and a program of many, which need not round alike."""
    lm = tiny_model("gpt2", model__final_norm="none")
    args = (lm, *ROWS, "feed_forward.out", ANSWERS)
    exact, linear = effects(*args)[1] - float(metric(lm)), attribution(*args)[1]
    assert relative_error(linear, exact) < 100 * TOLERANCE["float32"]
    assert (linear[:-1] == 0).all() and linear[-1] != 0
    assert (exact[:-1] == exact[0]).all() and abs(exact[0]) < TOLERANCE["float32"] * abs(exact[-1])


def test_a_planted_causal_place_is_found_and_only_it():
    """The last token has occurred before; the token after that occurrence is the answer. Layer 1 reads it there."""
    tokens = np.random.default_rng(1).permutation(24)[:12]
    clean, corrupted = np.array([[*tokens, tokens[4]]]), np.array([[*tokens, tokens[4]]])
    corrupted[0, 5] = 23 - corrupted[0, 5] if 23 - corrupted[0, 5] not in tokens else np.setdiff1d(range(24), tokens)[0]
    lm = planted()
    answers = int(clean[0, 5]), int(corrupted[0, 5])
    result = analysis.patching(lm, clean, corrupted, answers, ("attention.residual", "attention.out"))
    stream, written = result.data["attention.residual"], result.data["attention.out"]
    assert stream[0, 5] == pytest.approx(1, abs=0.02) and stream[1, -1] == pytest.approx(1, abs=0.02)
    assert written[1, -1] == pytest.approx(1, abs=0.02)
    rest = np.delete(stream.ravel(), [5, 25]), np.delete(written.ravel(), 25)
    assert max(np.abs(each).max() for each in rest) < 0.02
    assert result.data["clean"] == pytest.approx(1, abs=0.02) and result.data["corrupted"] == pytest.approx(-1, abs=0.02)


def test_a_path_through_the_last_block_is_the_effect_of_its_input():
    """Only the receiver's input changes: by what the sender writes, added to the stream, as in a block with pre-norms."""
    lm = tiny_model("gpt2")
    effect_NC = paths(lm, *ROWS, "blocks.1.feed_forward", ANSWERS)
    assert np.isnan(effect_NC[1, 1]) and np.isfinite(effect_NC[0]).all() and np.isfinite(effect_NC[1, 0])
    outs = [f"blocks.{name}.out" for name in ("0.attention", "0.feed_forward", "1.attention")]
    clean, corrupted = (lm.capture(each, outs) for each in (CLEAN_BL, CORRUPTED_BL))
    stream = lm.capture(CORRUPTED_BL, "blocks.1.feed_forward.before")["blocks.1.feed_forward.before"]
    for (layer, column), name in zip(((0, 0), (0, 1), (1, 0)), outs, strict=True):
        changed = stream + clean[name] - corrupted[name]
        read = lm.capture(CORRUPTED_BL, "blocks.1.feed_forward.in", replace={"blocks.1.feed_forward.before": changed})
        assert relative_error(effect_NC[layer, column], metric(lm, read)) < 100 * TOLERANCE["float32"]
    with pytest.raises(UserError, match="it must be final or a sublayer"):
        paths(lm, *ROWS, "blocks.9.attention", ANSWERS)


@pytest.mark.parametrize("layout", ["parallel", "skipless_parallel"])
def test_a_path_to_attention_does_not_change_what_the_feed_forward_beside_it_reads(layout):
    """In a parallel block the feed-forward reads attention's input. What it writes stays that of the corrupted pass."""
    lm = tiny_model("gptj", model__blocks__main__layout=layout)
    effect_NC = paths(lm, *ROWS, "blocks.0.attention", ANSWERS)
    assert np.isnan(effect_NC).all()  # no sublayer is before it
    effect_NC = paths(lm, *ROWS, "blocks.1.attention", ANSWERS)
    outs = [f"blocks.0.{name}.out" for name in ("attention", "feed_forward")]
    clean, corrupted = (lm.capture(each, outs) for each in (CLEAN_BL, CORRUPTED_BL))
    written = lm.capture(CORRUPTED_BL, "blocks.1.feed_forward.out")
    for column, name in enumerate(outs):
        read = lm.capture(CORRUPTED_BL, "blocks.1.attention.in", replace=corrupted | {name: clean[name]})
        assert relative_error(effect_NC[0, column], metric(lm, read | written)) < 100 * TOLERANCE["float32"]


@pytest.mark.parametrize("name", ["gpt2", "vanilla_2017_decoder"])
def test_a_direct_path_to_the_head_changes_one_term_of_the_last_sum(name):
    """In a layout with pre-norms the last stream is the sum of all writes; a post norm reads them again."""
    lm = tiny_model(name)
    data = analysis.patching(lm, CLEAN_BL, CORRUPTED_BL, ANSWERS, ("attention.out",)).data
    taps = [f"blocks.{layer}.{name}.out" for layer in range(2) for name in ("attention", "feed_forward")]
    clean, corrupted = (lm.capture(each, taps) for each in (CLEAN_BL, CORRUPTED_BL))
    for number, tap in enumerate(taps):
        expected = metric(lm, corrupted | {tap: clean[tap]})
        value = data["paths"][divmod(number, 2)] * (data["clean"] - data["corrupted"]) + data["corrupted"]
        assert relative_error(value, expected) < 100 * TOLERANCE["float32"], tap


def test_the_planted_place_has_the_direct_path():
    """Only layer 1 writes the answer; layer 0 acts through layer 1, so its direct path has no effect."""
    tokens = np.random.default_rng(1).permutation(24)[:12]
    clean, corrupted = np.array([[*tokens, tokens[4]]]), np.array([[*tokens, tokens[4]]])
    corrupted[0, 5] = np.setdiff1d(range(24), tokens)[0]
    actual = analysis.patching(planted(), clean, corrupted, (int(clean[0, 5]), int(corrupted[0, 5]))).data["paths"]
    assert actual[1, 0] == pytest.approx(1, abs=0.02) and abs(actual[0, 0]) < 0.02
