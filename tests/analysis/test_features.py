"""Features of a tap: figures by their definitions, taps and targets, resume, and the files."""

import json
from importlib import import_module

import numpy as np
import pytest
from safetensors.numpy import load

from tests.tiny_runs import tiny_model
from xfresearch import UserError, analysis
from xfresearch.analysis.features import value_tokens
from xfresearch.analysis.sequences import Sequences
from xfresearch.analysis.tap_vectors import Shuffled, activations, width_of

rng = np.random.default_rng(0)
TOKENS_NL, TRAINING_NL = rng.integers(257, size=(11, 16)), rng.integers(257, size=(16, 64))
SHORT = {"sizes": (32,), "k": 4, "steps": 20, "training": TRAINING_NL}


@pytest.fixture(scope="module")
def lm():
    return tiny_model("gpt2")


@pytest.fixture(scope="module")
def transcoder(lm):
    taps = {"tap": "blocks.1.feed_forward.in", "target": "blocks.1.hook_mlp_out"}
    return analysis.features(lm, TOKENS_NL, **SHORT | {"sizes": (64, 32)}, **taps)


def jump(data: dict, size: int, x):
    """The coefficients and the prediction, in NumPy."""
    w = {name: np.float64(data[f"{size}/{name}"]) for name in ("encoder_DF", "encoder_bias_F", "threshold_F", "decoder_FE")}
    z = x @ w["encoder_DF"] + w["encoder_bias_F"]
    f = np.where(z > w["threshold_F"], np.maximum(z, 0), 0)
    return f, f @ w["decoder_FE"] + data[f"{size}/decoder_bias_E"]


def test_figures_are_those_of_the_definition(lm, transcoder):
    data = transcoder.data
    values = lm.capture(TOKENS_NL, ["blocks.1.feed_forward.in", "blocks.1.feed_forward.out"])
    x_BLD, y_BLE = map(np.float64, values.values())
    stream = Shuffled(lm, Sequences(TRAINING_NL), tuple(values), 1024, 8, 0)
    mean_E = np.asarray(stream.read(0)[1]).mean((0, 1))
    np.testing.assert_array_equal(data["sizes"], [32, 64])
    clean = np.asarray(lm.loss(TOKENS_NL)).mean()
    ablated = np.asarray(lm.loss(TOKENS_NL, replace={"blocks.1.feed_forward.out": mean_E})).mean()
    for n, size in enumerate((32, 64)):
        f, y = jump(data, size, x_BLD)
        replaced = np.asarray(lm.loss(TOKENS_NL, replace={"blocks.1.feed_forward.out": np.float32(y)})).mean()
        assert data["l0"][n] == pytest.approx((f > 0).sum(-1).mean(), rel=1e-3)
        assert data["dead"][n] == pytest.approx((~(f > 0).any((0, 1))).mean(), abs=1 / size)
        variance = ((y_BLE - mean_E) ** 2).sum()
        assert data["unexplained"][n] == pytest.approx(((y_BLE - y) ** 2).sum() / variance, rel=1e-3)
        assert data["recovered"][n] == pytest.approx((ablated - replaced) / (ablated - clean), rel=1e-2)
        np.testing.assert_allclose(data[f"{size}/frequency"], (f > 0).mean((0, 1)), atol=2 / f[..., 0].size)
        best_FT = -np.sort(-f.reshape(-1, size), 0)[:25].T
        np.testing.assert_allclose(data[f"{size}/coefficients"], best_FT, rtol=1e-3, atol=1e-3)
        at_FT = data[f"{size}/triggers"]
        picked = np.take_along_axis(f.reshape(-1, size).T, np.maximum(at_FT, 0), 1)
        np.testing.assert_allclose(np.where(at_FT < 0, 0, picked), best_FT, rtol=1e-3, atol=1e-3)
        words = np.asarray(lm.unembed(data[f"{size}/decoder_FE"])).argmax(-1)
        np.testing.assert_array_equal(data[f"{size}/value_tokens"][:, 0], words)
    assert transcoder.summary["loss"][0] == pytest.approx(clean, rel=1e-5)


def test_training_lowers_what_is_unexplained(lm):
    few, many = (analysis.features(lm, TOKENS_NL, **SHORT | {"steps": steps}).data for steps in (1, 80))
    assert many["unexplained"][0] < 0.7 * few["unexplained"][0] and many["l0"][0] == pytest.approx(4, abs=1.5)
    assert list(many["taps"]) == 2 * ["blocks.0.feed_forward.residual"]


def test_dimensions_after_those_of_tokens_are_one(lm):
    tap = "blocks.0.attention.heads"
    (x_TD,) = activations(lm, Sequences(TOKENS_NL), (tap,))
    assert x_TD.shape == (TOKENS_NL.size, width_of(lm.config, tap)) == (176, 32)
    np.testing.assert_array_equal(x_TD[16:].reshape(10, 16, 4, 8), lm.capture(TOKENS_NL, tap)[tap][1:])
    assert value_tokens(lm, tap, np.zeros((7, 32))).shape == (7, 0)  # they are not in the space of the stream


def test_an_epoch_reads_every_row_once_and_tokens_of_rows_are_mixed(lm):
    tap = ("embed",)
    rows_NL = np.arange(12)[:, None] + np.zeros((12, 4), int)  # the row of each token
    stream = Shuffled(lm, Sequences(rows_NL), tap, 8, 2, 0)
    table = np.asarray(lm.capture(np.arange(12)[None], "embed")["embed"][0] - lm.capture([[0]], "embed")["embed"][0])
    seen = [np.asarray(stream.read(number)[0]) for number in range(6)]
    assert seen[0].shape == (2, 8, 32) and len(table) == 12
    epochs = [np.sort(np.concatenate([stream._rows(number) for number in part])) for part in (range(3), range(3, 6))]
    for epoch in epochs:
        np.testing.assert_array_equal(epoch, np.arange(12))
    assert stream._rows(0) != stream._rows(3)
    whole = np.asarray(activations(lm, Sequences(rows_NL[stream._rows(0)]), tap)[0])
    assert (seen[0].reshape(16, 32) != whole).any()
    np.testing.assert_allclose(np.sort(seen[0].reshape(16, 32), 0), np.sort(whole, 0))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"tap": "blocks.9.attention.out"}, "this model has no such value"),
        ({"tap": "blocks.0.attention.weights"}, r"tap='.*weights' is not allowed: .* vector .* float32 \[1, 4, 16, 16\]"),
        ({"target": "blocks.*.attention.out"}, "target='.*' is not allowed: it must match one tap"),
        ({"tap": "final", "target": "embed"}, "target='embed' is not allowed: it must be computed after tap='final'"),
        ({"k": 0}, "k=0 is not allowed"),
        ({"k": 33}, "k=33 is not allowed: it must be at most the smallest size, 32"),
        ({"sizes": (0, 32)}, r"sizes=\(0, 32\) is not allowed: it must be integers of at least 1"),
        ({"sizes": ()}, r"sizes=\(\) is not allowed: it must be one number or more"),
        ({"training": [[300]]}, "token 300 is not allowed"),
    ],
)
def test_mistakes_are_one_line(lm, arguments, words):
    with pytest.raises(UserError, match=words) as caught:
        analysis.features(lm, TOKENS_NL, **SHORT | arguments)
    assert "\n" not in str(caught.value)


def test_an_interrupted_call_goes_on_from_its_state(lm, tmp_path, monkeypatch):
    monkeypatch.setattr("xfresearch.analysis.unfinished.EVERY", 0.0)
    monkeypatch.setattr(import_module("xfresearch.analysis.features"), "TOKENS", 128)
    read, passes = Shuffled.read, []
    interrupts = iter([False, False, False, True])  # the first pass is for the scale

    def interrupted(self, number):
        passes.append(number)
        if next(interrupts, False):
            raise KeyboardInterrupt
        return read(self, number)

    monkeypatch.setattr(Shuffled, "read", interrupted)
    file = tmp_path / "state.npz"
    with pytest.raises(KeyboardInterrupt):
        analysis.features(lm, TOKENS_NL, **SHORT, resume=file)
    again = analysis.features(lm, TOKENS_NL, **SHORT, resume=file)
    assert passes == [0, 0, 1, 2, 0, 2]  # of three passes, the first two are not computed again
    whole = analysis.features(lm, TOKENS_NL, **SHORT)
    for name, value in whole.data.items():
        np.testing.assert_array_equal(again.data[name], value, err_msg=name)
    passes.clear()
    analysis.features(lm, TOKENS_NL, **SHORT | {"k": 3}, resume=file)  # the state of other settings is not used
    assert passes == [0, 0, 1, 2]


def test_files_and_pages(transcoder, tmp_path):
    transcoder.save(tmp_path)
    config = json.loads((tmp_path / "dictionary_32" / "cfg.json").read_text())
    assert config["architecture"] == "jumprelu_transcoder" and config["d_sae"] == config["d_in"] == config["d_out"] == 32
    names = {"hook_name": "blocks.1.ln2.hook_normalized", "hook_name_out": "blocks.1.hook_mlp_out"}
    assert names.items() <= config["metadata"].items() and config["metadata"]["tap"] == "blocks.1.feed_forward.in"
    arrays = load((tmp_path / "dictionary_64" / "sae_weights.safetensors").read_bytes())
    assert {name: each.shape for name, each in arrays.items()} == {
        "W_enc": (32, 64), "b_enc": (64,), "W_dec": (64, 32), "b_dec": (32,), "threshold": (64,)
    }
    page = (tmp_path / "features_64.html").read_text()
    used = int((transcoder.data["64/frequency"] > 0).sum())
    assert page.count("<section") == used and page.count("writes</small>") == used
    report = (tmp_path / "report.html").read_text()
    assert 'href="features_32.html"' in report and report.count("<svg") == 4


def test_the_output_of_an_rms_norm_has_our_name_in_the_files():
    """TransformerLens' hook_normalized of an RMSNorm is another value: that before the gain."""
    taps = {"tap": "blocks.1.feed_forward.in", "target": "blocks.1.feed_forward.out"}
    result = analysis.features(tiny_model("llama"), TOKENS_NL, **SHORT | taps | {"steps": 1})
    metadata = json.loads(result.files["dictionary_32/cfg.json"])["metadata"]
    assert metadata["hook_name"] == "blocks.1.feed_forward.in" and metadata["hook_name_out"] == "blocks.1.hook_mlp_out"
