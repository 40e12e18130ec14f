"""The commands with configs/brody_majority.py: training, report, bit-for-bit resume and evaluation."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import xfresearch as xf
from tests.contracts.variants import ROOT
from xfresearch import evaluate, generate
from xfresearch.checkpoints import store
from xfresearch.data.pipeline import prepare
from xfresearch.evaluation import losses
from xfresearch.loading import loading
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError
from xfresearch.train import main as train_main
from xfresearch.training.metrics import read_metrics

CONFIG = f"{ROOT}/configs/brody_majority.py:tiny"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def trained(workdir, cache) -> dict:
    """Trains, and returns the JSON results of the command."""

    result = workdir.with_suffix(".json")
    flags = [f"--config.data.cache_dir={cache}", "--config.log.tracker=jsonl", "--config.checkpoint.keep=9"]
    train_main(["--config", CONFIG, "--workdir", str(workdir), "--json", str(result), *flags])
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache):
    workdir = tmp_path_factory.mktemp("runs") / "m"
    return workdir, trained(workdir, cache)


def test_the_model_learns_more_than_to_copy(run):
    """A model that copies each token is right where the token is its sequence's majority. No model can do better
    without reading other tokens, so a higher accuracy shows that the model reads them."""
    workdir, result = run
    held_out = prepare(loading.run_config(workdir), "validation")
    examples = held_out.examples(range(len(held_out)))
    copies = (examples.tokens == examples.targets).mean()
    assert 0.4 < copies < 0.6
    assert result["evaluation"]["accuracy"] > (1 + copies) / 2
    assert result["evaluation"]["loss"] < 0.5 < -np.log(1 / 8)


def test_the_run_has_no_text_metrics(run, capsys):
    workdir, result = run
    assert result["baselines"] == {} and result["samples"] == [] and not (workdir / "tokenizer").exists()
    rows = read_metrics(workdir / "metrics.jsonl")
    assert {row["kind"] for row in rows} == {"train", "evaluation"}
    text_metrics = {"bits_per_byte", "bytes", "perplexity", "bits_per_character"}
    assert not [row for row in rows if text_metrics & row.keys()] and not text_metrics & result["evaluation"].keys()
    seconds = [row["seconds"] for row in rows if row["kind"] == "train"]
    assert seconds == sorted(seconds) and 0 < seconds[0] < seconds[-1]
    html = (workdir / "report.html").read_text()
    figure = f"{result['evaluation']['accuracy']:.3f}"
    assert f'<div class="figure">{figure}</div><p>accuracy of held-out labels</p>' in html
    assert "<h3>Accuracy</h3><span>of held-out labels, by step" in html and "nats per label" in html
    assert not any(word in html for word in ("<h2>Sample", "Bits per byte", "bits per byte", "xfresearch.generate"))


def test_the_run_resumes_bit_for_bit(run, cache, tmp_path):
    workdir, whole = run
    broken = shutil.copytree(workdir, tmp_path / "broken")
    last = store.steps(broken)[-1]
    for step in store.steps(broken)[1:]:
        shutil.rmtree(store.directory(broken) / str(step))
    assert trained(broken, cache)["evaluation"] == whole["evaluation"]

    def state(directory):
        return json.loads((store.directory(directory) / str(last) / "meta" / "metadata").read_text())["digests"]

    def curve(directory):
        rows = read_metrics(directory / "metrics.jsonl")
        return [{name: value for name, value in row.items() if "second" not in name} for row in rows]

    assert state(broken) == state(workdir) and curve(broken) == curve(workdir)


def evaluated(run, *options, tmp_path) -> dict:
    evaluate.main(["--workdir", str(run[0]), "--json", str(tmp_path / "out.json"), *options])
    return json.loads((tmp_path / "out.json").read_text())


def test_evaluate_measures_every_label(run, tmp_path, capsys):
    # Step 15: the losses of later steps are only rounding errors.
    result = evaluated(run, "--step", "15", "--batch-size", "50", tmp_path=tmp_path)
    out, err = capsys.readouterr()
    assert "accuracy" in out and "loss in nats per label; its standard error is over 120 sequences" in out
    assert "bits" not in out and "sequences of 24 tokens" in err
    assert (result["tokens"], result["units"]) == (120 * 24, 120)
    lm, held_out = loading.load(run[0], 15), prepare(loading.run_config(run[0]), "validation")
    tokens_NL, targets_NL, *_ = held_out.examples(range(len(held_out)))
    logits_NLV = np.asarray(lm(tokens_NL), np.float64)
    assert result["accuracy"] == (logits_NLV.argmax(-1) == targets_NL).mean()
    assert result["by_difficulty"] == {"0": {"accuracy": result["accuracy"], "answers": 120 * 24}}
    shifted = logits_NLV - logits_NLV.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    nll_NL = -np.take_along_axis(logs, targets_NL[..., None], -1)[..., 0]
    assert result["loss"] == pytest.approx(nll_NL.mean(), rel=1e-5)
    nll_N = nll_NL.mean(1)
    assert result["standard_error"] == pytest.approx(nll_N.std(ddof=1) / 120**0.5, rel=1e-4)


def test_evaluate_measures_every_step_and_other_data(run, tmp_path, capsys):
    steps = evaluated(run, "--all-steps", tmp_path=tmp_path)["steps"]
    assert [each["step"] for each in steps] == [15, 30, 45, 60] and steps[0]["accuracy"] < steps[-1]["accuracy"]
    assert "accuracy  " in capsys.readouterr().out
    same = evaluated(run, tmp_path=tmp_path)
    other = evaluated(run, "--data", "majority:classes=8,samples=600,margin=4,seed=1", tmp_path=tmp_path)
    longer = evaluated(run, "--sequence-length", "30", "--limit", "20", tmp_path=tmp_path)
    assert other["loss"] != same["loss"] and (longer["tokens"], longer["units"]) == (600, 20)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--stride", "8"], "--stride is not allowed with .*, which predicts labels: it applies to next tokens only"),
        (["--per-document"], "--per-document is not allowed with .*, which predicts labels"),
        (
            ["--data", "python_stdlib"],
            "corpus 'python_stdlib' is not allowed: it has no labels, and .* predicts labels",
        ),
        (["--data", "majority"], "majority.samples=100000.* at most 3840"),
        (["--data", "majority:classes=9,samples=100"], "has 9 classes; the model's vocabulary has 8"),
        (["--split", "test"], "has no split 'test'; it has: train, validation"),
    ],
)
def test_options_that_labels_do_not_support_raise_an_error(run, options, message):
    with pytest.raises(UserError, match=message):
        evaluate.main(["--workdir", str(run[0]), *options])


def test_models_of_text_and_of_labels_reject_each_others_data(run, tmp_path):
    config = parse(["--config", f"{ROOT}/configs/gpt2.py:tiny"])
    lm = SimpleNamespace(config=config.model, run=config)
    with pytest.raises(UserError, match="corpus 'majority' is not allowed: it has labels, and .* predicts next tokens"):
        losses.read_text(lm, tmp_path, "majority")
    with pytest.raises(UserError, match="this model has no tokenizer"):
        generate.main(["--workdir", str(run[0]), "--prompt", "a"])


def test_the_full_config_is_the_published_model():
    """Its parameters, counted in the published code: embeddings 20 x 8, attention 4 x 8 x 8 and an output bias, a norm,
    and 2 x (8 x 8 + 8)."""
    for arm in ("full", "scale", "project"):
        config = parse(["--config", f"{ROOT}/configs/brody_majority.py:{arm}"])
        assert xf.costs(config).parameters == 160 + 256 + 8 + 16 + 144
        assert (config.model.causal, config.model.dtype, config.model.vocab_size) == (False, "float32", 20)
        # The published schedule falls to 0 over 140,000 updates, but training ends after 1,000 epochs of 14 updates.
        share = 1 - config.steps / 140_000
        assert config.optimizer.final_fraction == pytest.approx(share) and config.optimizer.schedule == "linear"
