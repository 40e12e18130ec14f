"""The hooks that a run calls, and how a callback ends it."""

import shutil
from dataclasses import replace

import pytest

from tests.tiny_runs import tiny_config
from xfresearch.checkpoints import store
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.runtime.errors import UserError
from xfresearch.training import loop
from xfresearch.training.callbacks import Callback, StopTraining
from xfresearch.training.metrics import read_metrics

HOOKS = ("on_outline", "on_start", "on_step", "on_evaluation", "on_checkpoint", "on_row", "on_end")


class Recorder(Callback):
    """The hooks that were called, with their arguments. `at` is a hook and a step at which it raises `error`."""

    def __init__(self, at: tuple = (), error: Exception | None = None):
        self.calls = []
        for name in HOOKS:
            setattr(self, name, lambda *arguments, name=name: self._record(name, arguments, at, error))

    def _record(self, name, arguments, at, error):
        self.calls.append((name, *arguments))
        if (name, arguments[0]) == at:
            raise error

    def of(self, name: str) -> list[tuple]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, directory, recorder) of a run of six updates."""
    folder = tmp_path_factory.mktemp("run")
    for number in range(40):
        (folder / f"{number}.txt").write_text("some text to read\n" * 20)
    given = {"data__corpus": f"('text_files:{folder}/*.txt',)", "sequence_length": 16, "batch_size": 2, "steps": 6}
    given |= {"checkpoint__every": 3, "checkpoint__keep": 9, "log__tracker": "jsonl", "log__every": 2}
    config = tiny_config("gpt2", **given, evaluation__every=2, evaluation__sequences=4, evaluation__final_sequences=8)
    seen = Recorder()
    loop.train(config, folder / "run", ByteTokenizer(), callbacks=[seen])
    return config, folder / "run", seen


def rows(workdir, without=("unix_seconds", "seconds", "tokens_per_second", "model_flops_utilisation")) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in without} for row in read_metrics(workdir / "metrics.jsonl")]


def test_every_hook_is_called_in_order(run):
    config, workdir, seen = run
    kinds = [(call[0], *call[1:2]) if call[0] not in ("on_outline", "on_start") else call[:1] for call in seen.calls]
    step = lambda n: [("on_step", n), ("on_row", n)] if n % 2 == 0 else [("on_step", n)]  # noqa: E731
    evaluated = lambda n: [("on_row", n), ("on_evaluation", n)]  # noqa: E731
    expected = [("on_outline",), ("on_start",), *step(1), *step(2), *evaluated(2), *step(3), ("on_checkpoint", 3)]
    expected += [*step(4), *evaluated(4), *step(5), *step(6), *evaluated(6), ("on_checkpoint", 6), ("on_end", 6)]
    assert kinds == expected
    [[start]] = seen.of("on_start")
    assert (start.config, start.step, start.workdir.name) == (config, 0, "run") and 0.9 < start.bytes_per_token < 1
    assert seen.of("on_checkpoint")[-1][1] == str(workdir / "checkpoints" / "6") and seen.of("on_end") == [(6, "")]


def test_hooks_see_numbers_and_never_arrays(run):
    for _, figures in [*run[2].of("on_step"), *run[2].of("on_evaluation")]:
        assert {type(value) for value in figures.values()} <= {int, float} and figures["loss"] > 0
    first = run[2].of("on_step")[0][1]
    assert first["tokens"] == 32 and first["learning_rate"] > 0 and {"gradient_norm", "tokens_per_second"} <= first.keys()
    written = rows(run[1], without=("unix_seconds",))
    assert [{"step": step, "kind": kind, **figures} for step, kind, figures in run[2].of("on_row")] == written


def test_the_best_evaluation_is_among_those_of_as_much_text(run):
    found = {step: figures for step, figures in run[2].of("on_evaluation")}
    losses = {step: figures["loss"] for step, figures in found.items()}
    assert found[6]["best_step"] == min((2, 4), key=losses.get) and found[6]["best_loss"] == min(losses[2], losses[4])
    assert found[2]["best_step"] == 2


@pytest.mark.parametrize("at", [("on_step", 1), ("on_evaluation", 2), ("on_checkpoint", 3)])
def test_a_callback_ends_a_run_that_then_resumes_as_if_it_had_never_stopped(run, tmp_path, at):
    config, whole, _ = run
    after = Recorder()
    ended = loop.train(config, tmp_path, ByteTokenizer(), callbacks=[Recorder(at, StopTraining("enough")), after])
    assert (ended.stopped_by, ended.finished) == ("enough", False) and store.steps(tmp_path)[-1] == ended.step < 6
    assert ended.step - at[1] in (0, 1) and after.of("on_end") == [(ended.step, "enough")]
    resumed = Recorder()
    result = loop.train(config, tmp_path, ByteTokenizer(), callbacks=[resumed])
    assert result.finished and resumed.of("on_start")[0][0].step == ended.step and rows(tmp_path) == rows(whole)
    assert resumed.of("on_evaluation")[-1][1]["best_loss"] == run[2].of("on_evaluation")[-1][1]["best_loss"]


def test_an_error_of_a_callback_is_raised_after_the_state_is_saved(run, tmp_path):
    broken, other = Recorder(("on_step", 2), ZeroDivisionError("mine")), Recorder()
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        loop.train(run[0], tmp_path, ByteTokenizer(), callbacks=[broken, other])
    assert raised.traceback[-1].name == "_record" and store.steps(tmp_path) == [2]
    assert len(broken.of("on_step")) == 2 and broken.of("on_end") == []
    assert other.of("on_end") == [(2, "Recorder.on_step failed: ZeroDivisionError")]


def test_an_error_at_the_start_leaves_no_checkpoint(run, tmp_path):
    class Refuses(Callback):
        def on_start(self, start):
            raise UserError("no account")

    other = Recorder()
    with pytest.raises(UserError, match="no account"):
        loop.train(run[0], tmp_path, ByteTokenizer(), callbacks=[other, Refuses()])
    assert store.steps(tmp_path) == [] and other.of("on_end") == [(0, "UserError: no account")]


def test_a_failing_run_ends_its_callbacks_with_the_error(run, tmp_path):
    seen, config = Recorder(), replace(run[0], steps=9)
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=1e30))
    shutil.copytree(run[1], tmp_path / "run")
    with pytest.raises(loop.Diverged):
        loop.train(config, tmp_path / "run", ByteTokenizer(), fork=True, callbacks=[seen])
    [(_, reason)] = seen.of("on_end")
    assert reason.startswith("Diverged: ")


def test_something_else_than_a_callback_is_refused(run, tmp_path):
    with pytest.raises(UserError, match=r"callbacks\[0\]=.* is not allowed: it must be an xf.Callback"):
        loop.train(run[0], tmp_path, ByteTokenizer(), callbacks=[print])
