"""The training loop as a library: its rows, the losses that choose the best checkpoint, runs without an update left, time
before a resume, and losses that are not finite."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from etils import epath

import xfresearch as xf
from tests.tiny_runs import tiny_config
from xfresearch.checkpoints import store
from xfresearch.checkpoints.validity import PUBLISHED
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.options.run_options import TrainingConfig
from xfresearch.runtime.errors import DIVERGED, Diverged, UserError, exit_code
from xfresearch.training import loop
from xfresearch.training.monitoring import Health
from xfresearch.training.workdir import record, write_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, directory) of a run with experts, whose last evaluation reads more than the others."""
    folder = tmp_path_factory.mktemp("run")
    for number in range(40):
        (folder / f"{number}.txt").write_text("some text to read\n" * 20)
    given = {"data__corpus": f"('text_files:{folder}/*.txt',)", "sequence_length": 16, "batch_size": 2, "steps": 6}
    given |= {"checkpoint__every": 3, "checkpoint__keep": 9, "log__tracker": "jsonl"}
    config = tiny_config("moe", **given, evaluation__every=2, evaluation__sequences=4, evaluation__final_sequences=8)
    loop.train(config, folder / "run", ByteTokenizer())
    return config, folder / "run"


def rows(workdir, kind: str) -> list[dict]:
    listed = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in listed if row["kind"] == kind]


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
    outcome = rows(tmp_path / "run", "evaluation")
    (row,) = (row for row in outcome if row["step"] == 3)
    assert result.finished and result.step == 3 and row["loss"] == result.evaluation["loss"]
    assert result.evaluation["tokens"] == 2 * outcome[0]["tokens"]
    again = loop.train(replace(config, steps=3), tmp_path / "run", ByteTokenizer())
    assert again.evaluation == result.evaluation


def test_after_a_change_of_the_held_out_text_a_finished_run_is_evaluated_again(run, tmp_path):
    config, workdir = run
    shutil.copytree(workdir, tmp_path / "run")

    def again(**changes):
        """The evaluation of the finished run with these options, and the row of its last update."""
        changed = replace(config, evaluation=replace(config.evaluation, **changes))
        figures = loop.train(changed, tmp_path / "run", ByteTokenizer()).evaluation
        return figures, rows(tmp_path / "run", "evaluation")[-1]

    first, row = again()
    assert row == rows(workdir, "evaluation")[-1] and again(sequences=2)[1] == row and again(batch_size=4)[1] == row
    other, changed = again(split="train")
    assert changed["unix_seconds"] != row["unix_seconds"] and changed["loss"] == other["loss"]
    assert again(final_sequences=4)[0]["tokens"] == first["tokens"] / 2 and again(every=0)[0] == {}
    assert again()[0] == first


@pytest.mark.parametrize("changes, compared, best", [({}, {6, 9}, 4), ({"split": "train"}, {9}, 8)])
def test_losses_of_two_texts_are_not_compared(run, tmp_path, monkeypatch, changes, compared, best):
    """The loss grows with each evaluation, so that the first of one text is the best."""
    measured, seen = loop.summary, []

    def growing(sums, meta):
        seen.append(float(len(seen)))
        return measured(sums, meta) | {"loss": seen[-1]}

    monkeypatch.setattr(loop, "summary", growing)
    config = replace(run[0], evaluation=replace(run[0].evaluation, every=4, final_sequences=4), steps=6)
    loop.train(config, tmp_path, ByteTokenizer())
    config = replace(config, evaluation=replace(config.evaluation, **changes), steps=9)
    loop.train(config, tmp_path, ByteTokenizer(), fork=True)
    assert losses(tmp_path) == compared
    meta = json.loads((store.directory(tmp_path) / "9" / "meta" / "metadata").read_text())
    assert meta["best"]["best_step"] == best


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


def forked(run, target, **changes):
    """The config of a run that goes on from update 6, in a copy of `run` at `target`, with a rate that breaks the model."""
    config = replace(run[0], checkpoint=replace(run[0].checkpoint, every=1, keep=2, keep_best=False))
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=changes.pop("rate", 1e30)))
    config = replace(config, training=replace(config.training, **changes.pop("training", {})))
    config = replace(config, evaluation=replace(config.evaluation, every=changes.pop("every", 0)))
    shutil.copytree(run[1], target)
    return replace(config, **changes)


def diverged(config, workdir, fork: bool = True) -> str:
    """What a run that fails says about the reason. Its last good checkpoint is step 6, as in every copy of `run`."""
    with pytest.raises(Diverged) as raised:
        loop.train(config, workdir, ByteTokenizer(), fork=fork)
    assert exit_code(raised.value) == DIVERGED and store.steps(workdir)[-1] == 6
    reason, good = str(raised.value).split("; ")
    assert good == "the last good checkpoint is step 6"
    return reason


def test_a_checkpoint_after_which_the_loss_is_not_finite_is_rejected(run, tmp_path, capsys):
    """Update 7 makes the parameters so large that the loss of update 8 is NaN. The run that resumes finds the same."""
    config, workdir = forked(run, tmp_path / "run", steps=9), tmp_path / "run"
    for fork in (True, False):
        assert diverged(config, workdir, fork) == "the loss or gradient of step 8 (batch 7) is not finite"
        assert store.published(workdir) == [6, 7]
    assert "checkpoints/7 to" in capsys.readouterr().err and (workdir / "damaged" / "7-0").is_dir()
    assert xf.load(workdir).step == 6 and xf.load(workdir, step=7).step == 7
    assert "checkpoint 7 is not good: the loss or gradient of step 8" in capsys.readouterr().err


def test_a_fork_uses_only_checkpoints_that_were_written_to_their_end(run, tmp_path, capsys):
    """Checkpoint 9 is a part of a copy. It is in the way of those that the run saves."""
    config, workdir = forked(run, tmp_path / "run", steps=7, rate=0.01), epath.Path(tmp_path / "run")
    write_config(workdir, run[0], ByteTokenizer())
    part = shutil.copytree(store.directory(workdir) / "6", store.directory(workdir) / "9")
    (part / PUBLISHED).unlink()
    record(workdir, config, fork=True)
    assert loop.train(config, workdir, ByteTokenizer(), fork=True).finished
    assert "--fork: resumes from step 6 with config.steps: 6 -> 7" in capsys.readouterr().err
    assert store.present(workdir) == store.steps(workdir) == [6, 7] and (workdir / "damaged" / "9-0").is_dir()
    for step in ("6", "7"):
        (store.directory(workdir) / step / PUBLISHED).unlink()
    with pytest.raises(UserError, match="which has no good checkpoint to resume from"):
        record(workdir, config, fork=True)
    with pytest.raises(UserError, match="every checkpoint is damaged, unfinished or not good"):
        loop.train(config, workdir, ByteTokenizer())


def test_a_last_update_that_overflows_fails_the_run(run, tmp_path):
    """At this rate parameters become infinite. The gradient of update 7 is finite."""
    config = forked(run, tmp_path / "run", steps=7, rate=3e38)
    config = replace(config, optimizer=replace(config.optimizer, weight_decay=1e4))
    said = diverged(config, tmp_path / "run")
    assert re.fullmatch(r"after update 7, params/\S+ and \d+ more has values that are not finite", said)
    assert store.published(tmp_path / "run") == [3, 6]


def test_a_held_out_loss_that_is_not_finite_fails_the_run(run, tmp_path, monkeypatch):
    measured = loop.summary
    monkeypatch.setattr(loop, "summary", lambda *given: measured(*given) | {"loss": float("nan")})
    config, workdir = forked(run, tmp_path / "run", steps=8, rate=0.01, every=7), tmp_path / "run"
    assert diverged(config, workdir) == "the held-out loss after update 7 is not finite"
    assert store.published(workdir) == [3, 6]


def test_a_run_that_skips_most_updates_fails(run, tmp_path):
    """Updates 8 to 18 are skipped. None of the states from 7 on is known to be good."""
    config, workdir = forked(run, tmp_path / "run", steps=18, training={"on_nonfinite": "skip"}), tmp_path / "run"
    config = replace(config, checkpoint=replace(config.checkpoint, every=5, keep=1))
    said = "11 of the 18 updates up to step 18 were skipped, more than training.skip_limit=0.5 allows"
    assert diverged(config, workdir) == said and store.published(workdir) == [6, 15]
    config = replace(config, steps=9, training=replace(config.training, skip_limit=1.0))
    assert diverged(config, workdir).startswith("update 9, the last, was skipped, and no held-out loss shows")
    measured = replace(config, evaluation=replace(config.evaluation, every=9))
    assert loop.train(measured, workdir, ByteTokenizer()).finished and store.present(workdir) == [9]


@pytest.mark.parametrize(
    "limit, updates, failed",
    [(0.5, "o" * 4 + "x" * 5, 9), (0.5, "ox" * 300, None), (0.5, "x" * 60 + "o" * 99, 51), (0.1, "ooo" * 90 + "x" * 20, 281)]
    + [(1.0, "x" * 200, None), (0.0, "oxo", 2), (0.5, "o" * 500 + "x" * 50, None), (0.5, "o" * 500 + "x" * 51, 551)],
)
def test_more_than_the_allowed_share_of_the_last_hundred_updates_fails_a_run(limit, updates, failed):
    """x is an update that is skipped. A run that resumes after any update counts on."""
    config, health, actual = TrainingConfig(on_nonfinite="skip", skip_limit=limit), None, None
    for step, each in enumerate(updates, start=1):
        health = Health(config, health.skipped if health else [])
        if health.failure(step, each == "o", step == len(updates)):
            actual = step
            break
    assert actual == failed
