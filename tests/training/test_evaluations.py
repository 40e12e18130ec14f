"""Evaluations of a run: which losses choose the best checkpoint, and what a run measures that has no update left."""

import json
import shutil
from dataclasses import replace

import pytest

from tests.tiny_runs import tiny_config
from xfresearch.checkpoints import store
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.training import loop


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, directory) of a run whose last evaluation reads more than the others."""
    folder = tmp_path_factory.mktemp("run")
    for number in range(40):
        (folder / f"{number}.txt").write_text("some text to read\n" * 20)
    given = {"data__corpus": f"('text_files:{folder}/*.txt',)", "sequence_length": 16, "batch_size": 2, "steps": 6}
    given |= {"checkpoint__every": 3, "checkpoint__keep": 9, "log__tensorboard": False}
    config = tiny_config(**given, evaluation__every=2, evaluation__sequences=4, evaluation__final_sequences=8)
    loop.train(config, folder / "run", ByteTokenizer())
    return config, folder / "run"


def losses(workdir) -> set[int]:
    meta = (store.directory(workdir) / str(store.steps(workdir)[-1]) / "meta" / "metadata").read_text()
    return {int(step) for step in json.loads(meta)["losses"]}


def test_only_losses_of_one_text_choose_the_best_checkpoint(run, tmp_path):
    config, workdir = run
    assert store.steps(workdir) == [3, 6] and losses(workdir) == set()  # no evaluation at 3, and that at 6 reads more
    equal = replace(config, evaluation=replace(config.evaluation, final_sequences=4))
    loop.train(equal, tmp_path / "equal", ByteTokenizer())
    assert losses(tmp_path / "equal") == {6}


def test_a_fork_that_ends_at_a_checkpoint_without_evaluation_is_evaluated(run, tmp_path):
    config, workdir = run
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(store.directory(tmp_path / "run") / "6")
    result = loop.train(replace(config, steps=3), tmp_path / "run", ByteTokenizer(), fork=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if row["kind"] == "evaluation" and row["step"] == 3)
    assert result.finished and result.step == 3 and row["loss"] == result.evaluation["loss"]
    assert result.evaluation["tokens"] == 2 * next(row["tokens"] for row in rows if row["kind"] == "evaluation")
    again = loop.train(replace(config, steps=3), tmp_path / "run", ByteTokenizer())
    assert again.evaluation == result.evaluation
