"""config.log.panel: figures of every layer while a model trains."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.contracts.variants import ALL, random_params, tree_error
from tests.tiny_runs import tiny_config, tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import analysis
from xfresearch.analysis.panel import LENGTH, REPEATED, Panel
from xfresearch.data.pipeline import evaluation_batches, prepare
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.pages.panel import CAPTIONS, COLUMNS, panel_pictures
from xfresearch.runtime.errors import UserError
from xfresearch.training import loop

TOKENS_BL = np.random.default_rng(0).integers(257, size=(4, 24))  # rows of the analyses


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "notes.txt"
    path.write_text("".join(f"line {number} of the text\n" for number in range(2000)))
    return f"('text_files:{path}',)"


def config_of(directory, corpus, **changes):
    keys = {"data__corpus": corpus, "data__cache_dir": directory.parent / "cache", "evaluation__split": "train"}
    keys |= {"steps": 6, "checkpoint__every": 3, "evaluation__every": 6, "log__tracker": "jsonl", "log__panel": 2}
    return tiny_config(**(keys | changes))


def train(directory, corpus, **changes):
    return loop.train(config_of(directory, corpus, **changes), directory, ByteTokenizer(), panel=Panel)


def rows(directory) -> list[dict]:
    listed = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in row.items() if name != "unix_seconds"} for row in listed if row["kind"] == "panel"]


def test_figures_are_those_of_the_analyses():
    lm = tiny_model("moe")
    result = Panel(lm.config, {"tokens": TOKENS_BL})(lm.params)
    heads = analysis.attention(lm, TOKENS_BL).data
    half = TOKENS_BL.shape[1] // 2
    random_BL = np.random.default_rng(0).integers(257, size=(4, half))
    weights = lm.capture(np.concatenate([random_BL, random_BL], 1), "blocks.*.attention.weights").values()
    after_last_BHL = [np.stack([w[:, :, half + n, n + 1] for n in range(half)], -1) for w in map(np.asarray, weights)]
    copied = [w_BHL.mean((0, 2)).max() for w_BHL in after_last_BHL]
    coefficients = lm.capture(TOKENS_BL, "blocks.*.feed_forward.coefficients").values()
    expected = {
        "attention_entropy": heads["entropy"].mean(1),
        "first_token": heads["first"].mean(1),
        "previous_token": heads["previous"].max(1),
        "induction": copied,
        "along_ones": analysis.norms(lm, TOKENS_BL).data["projected"],
        "positive_coefficients": [(np.asarray(m) > 0).mean() for m in coefficients],
        "router_entropy": analysis.routing(lm, TOKENS_BL).data["entropy"],
        "lens_agreement": analysis.lens(lm, TOKENS_BL).data["agreement"],
    }
    assert list(result) == list(expected) == list(CAPTIONS)
    for name, value_N in expected.items():
        assert relative_error(result[name], value_N) < 10 * TOLERANCE["float32"], name


@pytest.mark.long
def test_layers_without_a_figure_are_not_a_number():
    config = ALL["pattern"]
    result = Panel(config, {"tokens": TOKENS_BL % config.vocab_size})(random_params(config))
    assert np.isnan(result["router_entropy"]).any() and np.isfinite(result["router_entropy"]).any()
    assert np.isfinite(result["lens_agreement"]).all()


def test_only_the_first_tokens_of_long_rows_are_read():
    config = replace(tiny_model().config, max_length=2 * LENGTH)
    params = random_params(config)
    long_BL = np.random.default_rng(1).integers(257, size=(1, 2 * LENGTH))
    assert Panel(config, {"tokens": long_BL})(params) == Panel(config, {"tokens": long_BL[:, :LENGTH]})(params)
    assert REPEATED < LENGTH // 2


def test_a_run_logs_rows_from_the_start_to_the_end(tmp_path, corpus):
    result = train(tmp_path / "run", corpus, steps=5)
    outcome = rows(tmp_path / "run")
    assert [row.pop("step") for row in outcome] == [0, 2, 4, 5]
    config = config_of(tmp_path / "run", corpus, steps=5)
    held_out = next(evaluation_batches(prepare(config, "train", tokenizer=ByteTokenizer()), 8, 8))["tokens"]
    assert outcome[-1] == {"kind": "panel"} | Panel(config.model, {"tokens": held_out})(result.params)
    assert set(outcome[0]) == {"kind", *CAPTIONS} - {"router_entropy"}
    assert outcome[0]["induction"] != outcome[-1]["induction"]


@pytest.mark.long
def test_the_panel_changes_no_update_and_a_resumed_run_has_the_same_rows(tmp_path, corpus):
    with_panel = train(tmp_path / "with", corpus)
    without = train(tmp_path / "without", corpus, log__panel=0)
    assert tree_error(with_panel.params, jax.device_get(without.params)) == 0 and not rows(tmp_path / "without")
    whole = rows(tmp_path / "with")
    shutil.rmtree(tmp_path / "with" / "checkpoints" / "6")
    train(tmp_path / "with", corpus)
    assert rows(tmp_path / "with") == whole and [row["step"] for row in whole] == [0, 2, 4, 6]
    shutil.rmtree(tmp_path / "with" / "checkpoints")  # as if it had been killed before the first one
    train(tmp_path / "with", corpus)
    assert rows(tmp_path / "with") == whole


def test_it_needs_held_out_rows(tmp_path, corpus):
    with pytest.raises(UserError, match=r"config.evaluation.every=0 is not allowed: .* log.panel"):
        train(tmp_path / "run", corpus, evaluation__every=0)


def test_pictures_have_layers_by_steps():
    made = [{"kind": "panel", "step": 10 * n, "induction": [n / 200, None], "along_ones": [None, None]} for n in range(200)]
    picture, *others = panel_pictures([{"kind": "train", "step": 1}, *made])
    assert picture.title == "Induction" and "repeated" in picture.caption and not others
    svg = picture.svg()
    assert svg.count("<title>") == COLUMNS and "layer 0, step 1990: " in svg and "layer 1" not in svg
    assert panel_pictures([]) == []
