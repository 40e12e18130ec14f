"""Runs of a model with an encoder: what fits an objective, and training and evaluation on pairs and on corrupted spans."""

import json
from itertools import islice

import numpy as np
import pytest

import xfresearch as xf
from tests.contracts.variants import ROOT
from xfresearch import evaluate
from xfresearch.data.pairs import open_pairs
from xfresearch.evaluation import decoded
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError
from xfresearch.train import main as train_main

TINY = ["--config", f"{ROOT}/configs/tasks/sort.py:tiny"]
SMALL = ["--config.model.depth=1", "--config.model.stacks.encoder.depth=1"]
SPANS = ["--config.data.objective.kind=span_corruption", "--config.sequence_length=17"]
END = 256  # of the byte tokenizer
FLAGS = [*SMALL, "--config.log.tracker=jsonl", "--config.evaluation.every=20", "--config.steps=20"]
FLAGS += ["--config.evaluation.sequences=16", "--config.evaluation.final_sequences=16", "--config.checkpoint.every=20"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.objective.kind=masked"], "kind='masked' is not allowed: it must be one of 'seq2seq', 'span_corruption',"),
        (["data.objective.kind=next"], "kind='next' is not allowed: it must be one of 'seq2seq', 'span_corruption',"),
        (["source_length=0"], "source_length=0 is not allowed: it must be at least 1, the tokens of a source"),
        (["model.causal=False"], "model.causal=False is not allowed: it must be True: a decoder that sees the tokens"),
        (["data.packing=documents"], "data.packing='documents' is not allowed: it must be 'stream' with"),
    ],
)
def test_what_an_encoder_cannot_train_on_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        parse([*TINY, *(f"--config.{each}" for each in overrides)])


@pytest.mark.parametrize("kind", ["seq2seq", "span_corruption"])
def test_a_model_without_an_encoder_is_refused_what_needs_one(kind):
    with pytest.raises(UserError, match=f"kind='{kind}' is not allowed: it must be .* for a model without an encoder"):
        parse(["--config", f"{ROOT}/configs/gpt2.py:tiny", f"--config.data.objective.kind={kind}"])


def test_a_run_on_pairs_learns_and_is_evaluated_as_it_was_trained(tmp_path, capsys):
    train_main([*TINY, *FLAGS, "--workdir", str(tmp_path / "run"), "--json", str(tmp_path / "run.json")])
    results = json.loads((tmp_path / "run.json").read_text())
    assert results["samples"] == [] and results["evaluation"]["loss"] < np.log(27)  # letters and an end
    flags = ["--limit", "16", "--decode", "exact_match", "--json", str(tmp_path / "again.json")]
    evaluate.main(["--workdir", str(tmp_path / "run"), *flags])
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["loss"] == pytest.approx(results["evaluation"]["loss"], rel=1e-5)
    assert again["pairs"] == 16 and 0 <= again["exact_match"] < 0.5
    printed = capsys.readouterr()
    assert "sequences without end to train on" in printed.err and "predicts tokens of targets" in printed.err


@pytest.mark.long
def test_decoded_texts_are_those_of_a_plain_loop(tmp_path):
    """The reference: the likeliest token after all before it, from whole passes without a cache."""
    train_main([*TINY, *FLAGS, "--workdir", str(tmp_path / "run")])
    lm = xf.load(tmp_path / "run")
    texts = decoded.decode(lm, limit=3)
    pairs = list(islice(open_pairs("sort", lm.run.data).pairs("validation"), 3))
    assert (texts.sources, texts.targets) == tuple(list(map(bytes.decode, side)) for side in zip(*pairs, strict=True))
    for source, output in zip(texts.sources, texts.outputs, strict=True):
        tokens_L = np.full((1, lm.run.sequence_length), END)
        for place in range(1, lm.run.sequence_length):
            logits_BLV = lm(tokens_L, source=[[*source.encode(), END]])
            tokens_L[0, place] = int(np.argmax(logits_BLV[0, place - 1, : END + 1]))
            if tokens_L[0, place] == END:
                break
        expected = tokens_L[0, 1 : place + 1]
        assert output == bytes(expected[expected != END].tolist()).decode("utf-8", "replace")


@pytest.mark.long
def test_a_run_on_corrupted_spans(tmp_path):
    flags = [*FLAGS, *SPANS, "--config.data.corpus=('python_stdlib',)", "--config.source_length=64"]
    train_main([*TINY, *flags, "--workdir", str(tmp_path / "run"), "--json", str(tmp_path / "run.json")])
    results = json.loads((tmp_path / "run.json").read_text())
    assert results["evaluation"]["loss"] < 0.8 * np.log(357)
