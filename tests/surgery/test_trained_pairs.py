"""A model that has learnt the task `sort` decodes the same texts when W_Q and W_K of its cross-attention are one matrix."""

import pytest

import xfresearch as xf
from xfresearch import surgery
from xfresearch.evaluation import decoded
from xfresearch.studies import probes
from xfresearch.train import main as train_main

SIZE = ("model.width=32", "model.blocks.main.attention.heads=2", "model.blocks.main.cross_attention.heads=2")
TRAINING = ("steps=800", "batch_size=16", "optimizer.learning_rate=0.016", "evaluation.sequences=256")
PAIRS = ("data.corpus=('sort:held_out=1000',)", "model.stacks.encoder.blocks.main.attention.heads=2")


@pytest.mark.long
def test_a_model_that_sorts_decodes_the_same_when_merged(tmp_path):
    given = [f"--config.{each}" for each in (*SIZE, *TRAINING, *PAIRS)]
    train_main(["--config", "tasks/sort", "--workdir", str(tmp_path / "run"), *given])
    lm = xf.load(tmp_path / "run")
    merged, _ = surgery.merge_query_key(lm, role="cross")
    assert merged.config.blocks["main"].cross_attention.query == "merged"
    of_pair, of_merged = decoded.decode(lm), decoded.decode(merged)
    assert of_pair.outputs == of_merged.outputs and len(of_pair.outputs) == 1000
    share = decoded.score(of_pair, ["exact_match"])["exact_match"]
    assert share >= 0.99
    assert probes.measure(lm, ["exact_match"]) == {"exact_match": share}  # which decodes nothing
