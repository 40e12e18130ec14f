"""The tuned lens: it starts as the logit lens, learns, and undoes a planted change of basis."""

from importlib import import_module

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from xfresearch import UserError, analysis
from xfresearch.analysis.sequences import Sequences
from xfresearch.analysis.tuned_lens import train

TOKENS_NL = np.random.default_rng(0).integers(257, size=(6, 16))


def test_without_steps_it_is_the_logit_lens():
    lm = tiny_model("gpt2")
    data = analysis.tuned_lens(lm, TOKENS_NL, steps=1, training=TOKENS_NL[:1]).data
    lens = analysis.lens(lm, TOKENS_NL).data
    for name in ("loss", "agreement", "divergence"):
        np.testing.assert_allclose(data[name], lens[name], rtol=1e-4, atol=1e-6)


def test_training_lowers_the_divergence_of_early_layers_on_other_rows():
    lm = tiny_model("gpt2")
    training = np.random.default_rng(1).integers(257, size=(64, 16))
    data = analysis.tuned_lens(lm, TOKENS_NL, steps=60, training=training).data
    assert data["tuned_divergence"][0] < 0.9 * data["divergence"][0]
    assert data["divergence"][-1] == pytest.approx(0, abs=1e-5)
    assert data["tuned_divergence"][-1] == pytest.approx(0, abs=1e-3)
    assert data["matrix"].shape == (2, 32, 32) and data["bias"].shape == (2, 32)


def test_it_does_not_apply_to_a_single_layer():
    with pytest.raises(UserError, match="^tuned_lens does not apply to this model: the model has one layer, "):
        analysis.tuned_lens(tiny_model("gpt2", model__depth=1), TOKENS_NL, steps=1, training=TOKENS_NL)


def test_translators_are_trained_and_the_model_is_not():
    lm = tiny_model("gpt2")
    before = np.asarray(lm.params["embed"]["table"]).copy()
    result = train(lm, Sequences(TOKENS_NL), 3)
    assert all(bool(jnp.abs(value[0]).max() > 0) for value in result.values())
    np.testing.assert_array_equal(lm.params["embed"]["table"], before)


@pytest.mark.parametrize("given", [True, False])
def test_by_default_it_is_trained_on_the_train_split_and_never_on_given_rows(given, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("".join(f"line {number} of the text\n" for number in range(500)))
    corpus = f"text_files:{tmp_path}/notes.txt"
    lm = tiny_model("gpt2", data__corpus=f"('{corpus}',)", data__cache_dir=tmp_path / "cache")
    seen = []
    module = import_module("xfresearch.analysis.tuned_lens")
    monkeypatch.setattr(module, "train", lambda lm, rows, steps: seen.append(rows.tokens_NL) or train(lm, rows, steps))
    analysis.tuned_lens(lm, TOKENS_NL if given else corpus, count=2, sequence_length=16, steps=2)
    np.testing.assert_array_equal(seen[0], next(lm.batches(corpus, "train", batch_size=16, length=16)))
