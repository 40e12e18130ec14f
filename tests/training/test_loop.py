"""The training loop as a library: its rows, the losses that choose the best checkpoint, runs without an update left, time
before a resume, and losses that are not finite."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from tests.tiny_runs import tiny_config
from xfresearch.checkpoints import store
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.errors import DIVERGED, Diverged, exit_code
from xfresearch.training import loop


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, directory) of a run with experts, whose last evaluation reads more than the others."""
    folder = tmp_path_factory.mktemp("run")
    for number in range(40):
        (folder / f"{number}.txt").write_text("some text to read\n" * 20)
    given = {"data__corpus": f"('text_files:{folder}/*.txt',)", "sequence_length": 16, "batch_size": 2, "steps": 6}
    given |= {"checkpoint__every": 3, "checkpoint__keep": 9, "log__tensorboard": False}
    config = tiny_config("moe", **given, evaluation__every=2, evaluation__sequences=4, evaluation__final_sequences=8)
    loop.train(config, folder / "run", ByteTokenizer())
    return config, folder / "run"


def rows(workdir, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


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
    found = rows(tmp_path / "run", "evaluation")
    (row,) = (row for row in found if row["step"] == 3)
    assert result.finished and result.step == 3 and row["loss"] == result.evaluation["loss"]
    assert result.evaluation["tokens"] == 2 * found[0]["tokens"]
    again = loop.train(replace(config, steps=3), tmp_path / "run", ByteTokenizer())
    assert again.evaluation == result.evaluation


def test_rows_have_the_routing_of_each_layer(run):
    row = rows(run[1], "train")[-1]
    load_RE, margin_R = row["router_load"]["main"], row["router_margin"]["main"]
    assert len(load_RE) == len(margin_R) == 2 and all(len(load_E) == 8 for load_E in load_RE)
    assert all(abs(sum(load_E) - 1) < 1e-5 for load_E in load_RE)


def test_a_run_that_a_library_resumes_counts_the_time_before(run):
    config, workdir = run
    assert not (workdir / "run.json").exists()  # the command writes it
    result = loop.train(config, workdir, ByteTokenizer())
    assert result.step == config.steps and result.clock.training_seconds() > 0 and result.clock.tokens > 0


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_last_good_checkpoint(run, tmp_path):
    config = replace(run[0], checkpoint=replace(run[0].checkpoint, every=1))
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=1e30))
    words = r"the loss or gradient of step (\d+) \(batch (\d+)\) is not finite; the last good checkpoint is step (\d+)"
    with pytest.raises(Diverged) as raised:
        loop.train(config, tmp_path / "run", ByteTokenizer())
    step, batch, good = map(int, re.fullmatch(words, str(raised.value)).groups())
    assert step - 1 == batch == good == store.steps(tmp_path / "run")[-1] and exit_code(raised.value) == DIVERGED
