"""Figures of predictions equal their definition, computed from passes of the reference alone, on every layout: dictionaries
of activations, recall of facts, and direct paths to a sublayer."""

import numpy as np
import pytest

from tests.analysis.test_figures import CASES, CLOSE, DAILY, TOKENS_NL, made
from tests.daily import daily
from tests.reference import figures, predictions
from tests.tolerances import relative_error
from xfresearch import LanguageModel, analysis
from xfresearch.analysis.patching import paths
from xfresearch.analysis.sequences import Sequences
from xfresearch.data.facts import Fact
from xfresearch.data.tokenizers import ByteTokenizer

TRAINING_NL = np.random.default_rng(4).integers(64, size=(4, 7))  # one batch, so that its mean is that of training
one_layout = pytest.mark.parametrize("layout, form", daily(DAILY[2:3], CASES))
# Every byte is a token below 64, as many as the models have.
FACTS = [
    Fact("7", "r", "25", ("7 + 3", "3 + 7 + 7"), ("7 =",)),
    Fact("8", "r", "4", ("8 + 1", "0"), ("8 =", "= 8 :")),
]


@one_layout
def test_features(layout, form, x64):
    """What follows from the arrays of a dictionary after two updates: of the stream, or of a transcoder, by form."""
    lm, F = made(layout, form), 20
    p = figures.Pass.of(lm.config, lm.params, TOKENS_NL)
    taps = ("blocks.0.attention.in", f"{p.ends[1]}.out") if form in ("slots", "experts") else 2 * (f"{p.ends[0]}.residual",)
    options = {"sizes": (F,), "k": 4, "steps": 2, "training": TRAINING_NL}
    data = analysis.features(lm, TOKENS_NL, tap=taps[0], target=taps[1], **options).data
    of_training = figures.Pass.of(lm.config, lm.params, TRAINING_NL)
    mean_E = predictions.of_tokens(of_training, taps[1]).mean((0, 1))
    parts = ("encoder_DF", "encoder_bias_F", "decoder_FE", "decoder_bias_E", "threshold_F")
    expected = predictions.features(p, taps, {part: data[f"{F}/{part}"] for part in parts}, mean_E)
    f_TF = expected["coefficients"].reshape(-1, F)
    assert 0 < (f_TF > 0).sum() < f_TF.size
    rows = {"l0": "l0_rows", "error": "error_rows", "replaced": "replaced_loss", "variance": "variance_rows"}
    for name, given in (rows | {"loss": "loss", "ablated": "ablated_loss"}).items():
        assert relative_error(data[given].ravel(), expected[name]) < CLOSE, name
    assert data["l0"][0] == pytest.approx((f_TF > 0).sum(1).mean(), rel=CLOSE)
    assert data["dead"][0] == (~(f_TF > 0).any(0)).mean()
    assert data["unexplained"][0] == pytest.approx(expected["error"].sum() / expected["variance"].sum(), rel=CLOSE)
    kept, whole = (expected["ablated"].sum() - expected[name].sum() for name in ("replaced", "loss"))
    assert data["recovered"][0] == pytest.approx(kept / whole, rel=CLOSE)
    np.testing.assert_allclose(data[f"{F}/frequency"], (f_TF > 0).mean(0), rtol=CLOSE)
    best_FT = np.sort(f_TF, 0)[::-1].T
    count = min(best_FT.shape[1], data[f"{F}/coefficients"].shape[1])
    np.testing.assert_allclose(data[f"{F}/coefficients"][:, :count], best_FT[:, :count], rtol=CLOSE, atol=CLOSE)
    at_FT = data[f"{F}/triggers"][:, :count]
    picked_FT = np.where(at_FT >= 0, np.take_along_axis(f_TF.T, at_FT, 1), 0)
    np.testing.assert_allclose(picked_FT, best_FT[:, :count], rtol=CLOSE, atol=CLOSE)
    if layout != "resi_dual":
        words_F = p.logits(np.asarray(data[f"{F}/decoder_FE"], np.float64)).argmax(-1)
        np.testing.assert_array_equal(data[f"{F}/value_tokens"][:, 0], words_F)


@one_layout
def test_recall(layout, form, x64):
    lm = made(layout, form)
    lm = LanguageModel(lm.config, lm.params, ByteTokenizer(), lm.run)
    for text, object_ in ((prompt, fact.object) for fact in FACTS for prompt in fact.prompts):
        assert lm.tokenizer.encode(f"{text} {object_}".encode()).max() < lm.config.vocab_size
    data = analysis.recall(lm, FACTS).data
    for number, fact in enumerate(FACTS):
        for prompts, name in ((fact.prompts, ""), (fact.held_out, "_held_out")):
            rows = [(f"{text} {fact.object}".encode(), len(text)) for text in prompts]
            each = [predictions.recalled(lm.config, lm.params, list(row), start) for row, start in rows]
            recalled, probability = np.mean(each, 0)
            assert data[f"recalled{name}"][number] == recalled
            assert data[f"probability{name}"][number] == pytest.approx(probability, rel=CLOSE)


@pytest.mark.parametrize("layout, form", daily(DAILY[-1:], CASES))
def test_paths_to_a_sublayer(layout, form, x64):
    lm = made(layout, form)
    rows = TOKENS_NL[:1, :4], TOKENS_NL[1:2, :4]
    clean, corrupted = (figures.Pass.of(lm.config, lm.params, each) for each in rows)
    senders = [tap.removesuffix(".out") for tap in lm.tap_names() if tap.endswith(".out")]
    last = len(senders) // lm.config.depth
    for receiver in senders[-last:]:
        before = senders[: senders.index(receiver)]
        effect_NC = paths(lm, *map(Sequences, rows), receiver, (7, 9))
        for number, sender in enumerate(senders):
            given = effect_NC.ravel()[number]
            if sender not in before:
                assert np.isnan(given)
                continue
            logits_V = predictions.path(clean, corrupted, sender, receiver, before)
            assert given == pytest.approx(logits_V[7] - logits_V[9], rel=CLOSE, abs=CLOSE), (sender, receiver)
