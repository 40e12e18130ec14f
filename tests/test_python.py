"""Training and sweeping from Python: the same runs as the commands make. The hooks of a run, and how a callback ends it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import xfresearch as xf
from tests.pages.test_cards import check
from xfresearch.checkpoints import store
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.run_config.config_files import as_arguments, default_config, parse
from xfresearch.runtime.run_rows import Rows
from xfresearch.training import loop, stopping
from xfresearch.training.callbacks import Callback, StopTraining
from xfresearch.training.metrics import read_metrics

SMALL = {"sequence_length": 16, "batch_size": 2, "steps": 6, "checkpoint.every": 3, "checkpoint.keep": 9}
SMALL |= {"evaluation.every": 2, "evaluation.sequences": 4, "evaluation.final_sequences": 8}
SMALL |= {"log.tracker": "jsonl", "log.every": 2}
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
def small(tmp_path_factory):
    """Overrides of a tiny run on a few sentences."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text("some text to read\n" * 20)
    return {**SMALL, "data.corpus": (f"text_files:{folder}/*.txt",)}


class Interrupts(xf.Callback):
    """Ctrl-C when the figures of update 1 are there: update 2 has begun."""

    def on_step(self, step, figures):
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """A run of six updates; `recorder` has seen it."""
    recorder = Recorder()
    result = xf.train("gpt2:tiny", small, workdir=str(tmp_path_factory.mktemp("runs") / "whole"), callbacks=[recorder])
    result.recorder = recorder
    return result


def same_curve(one: xf.Run, other: xf.Run) -> bool:
    return one.history["loss"].tolist() == other.history["loss"].tolist()


def test_a_run_has_its_history_model_and_report(run):
    assert run.finished and (run.step, run.stopped_by) == (6, "")
    assert run.history.where(kind="train")["step"].tolist() == [2, 4, 6]
    losses = {row["step"]: row["loss"] for row in run.history.where(kind="evaluation")}
    best = min((2, 4), key=losses.get)  # the last one reads more
    assert list(losses) == [2, 4, 6] and run.best == (best, losses[best])
    assert run.lm.step == 6 and run.lm([[1, 2]]).shape == (1, 2, 257)
    assert run.report.read_text().count("<svg") > 2
    assert f"held-out loss {losses[best]:.4f} at step {best}" in repr(run) and 'alt="Loss"' in check(run)
    drawn = run.figures(columns=2)["Loss"]
    np.testing.assert_array_equal(drawn.axes[0].lines[1].get_ydata(), list(losses.values()))
    start = json.loads((run.workdir / "run.json").read_text())["starts"][0]
    assert start["command"][:5] == ["python", "-m", "xfresearch.train", "--config", "gpt2:tiny"]


def test_ctrl_c_keeps_the_run_and_the_same_call_resumes_it(run, small, tmp_path, capsys):
    kept = xf.train("gpt2:tiny", small, workdir=str(tmp_path), callbacks=[Interrupts()])
    assert (kept.step, kept.stopped_by, kept.finished) == (2, "SIGINT", False)
    assert "SIGINT: saved step" in capsys.readouterr().err and kept.report.exists()
    assert "stopped by SIGINT" in repr(kept)
    resumed = xf.train("gpt2:tiny", small, workdir=str(tmp_path))
    assert resumed.finished and same_curve(resumed, run)


def test_another_thread_trains_without_signals_and_says_so_once(run, small, tmp_path, capsys):
    stopping._say_unhandled.cache_clear()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with ThreadPoolExecutor(1) as pool:
        ended = [pool.submit(xf.train, "gpt2:tiny", small, workdir=str(tmp_path / name)).result() for name in "ab"]
    assert all(each.finished and same_curve(each, run) for each in ended)
    assert capsys.readouterr().err.count("this trains in another thread than the main one") == 1
    assert handlers == {number: signal.getsignal(number) for number in handlers}


def test_a_callback_that_stops_a_run_leaves_a_report_with_its_results(small, tmp_path, capsys):
    class Once(xf.Callback):
        def on_evaluation(self, step, figures):
            raise xf.StopTraining("good enough")

    ended = xf.train("gpt2:tiny", small, workdir=str(tmp_path), callbacks=[Once()])
    assert (ended.step, ended.stopped_by) == (2, "good enough")
    said = capsys.readouterr()
    assert "ended after update 2: good enough" in said.err and "held-out bits per byte" in said.out
    whole = (tmp_path / "report.html").read_text()
    assert ended.report.read_text() == whole and "xfresearch.evaluate" in whole


def test_a_config_may_be_given_as_an_object(run, small, tmp_path):
    """A ConfigDict, which stays as it is, and the config of a run, with an override each. The data are those of `run`."""
    config = default_config()
    before = config.to_dict()
    with pytest.raises(xf.UserError, match="model.width"):
        xf.train(config, {"model.width": -1}, workdir=str(tmp_path / "a"))
    assert config.to_dict() == before
    again = xf.train(run.config, {"seed": 1}, workdir=str(tmp_path / "b"))
    assert again.finished and again.config == replace(run.config, seed=1) and not same_curve(again, run)


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (["gpt2:tiny", {"model.widht": 3}], {}, "model.widht=3.*did you mean"),
        (["gtp2:tiny"], {}, "there is no such file; did you mean 'gpt2:tiny'"),
        ([5], {"workdir": "a"}, "config=5 is not allowed: it must be the name of a config"),
        ([default_config()], {}, "workdir='' is not allowed"),
        (["gpt2:tiny"], {"callbacks": [print]}, r"callbacks\[0\]=.* is not allowed"),
    ],
)
def test_mistakes_are_one_line(arguments, options, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(xf.UserError, match=text) as raised:
        xf.train(*arguments, **options)
    assert "\n" not in str(raised.value)


def test_a_sweep_is_a_table_that_goes_on_where_it_stopped(small, tmp_path, capsys):
    """Ctrl-C comes in the first of two runs, which share one compiled program with the others here."""
    config = parse(as_arguments("gpt2:tiny", small))
    grid = {"optimizer.learning_rate": [0.01, 0.02]}

    def call(*callbacks):
        return xf.sweep(config, grid, workdir=str(tmp_path), seeds=[7], callbacks=callbacks)

    assert call(Interrupts()) == [] and "the same call goes on there" in capsys.readouterr().err
    table = call()
    assert table["seed"].tolist() == [7, 7] and table["optimizer.learning_rate"].tolist() == [0.01, 0.02]
    assert len(set(table["loss"])) == 2 and table["step"].tolist() == [6, 6]
    assert [folder.removeprefix(f"{tmp_path}/") for folder in table["workdir"]][0] == "optimizer.learning_rate=0.01/seed-7"
    runs = [xf.Run(folder) for folder in table["workdir"]]
    assert [each.history.where(kind="evaluation")["loss"][-1] for each in runs] == table["loss"].tolist()
    capsys.readouterr()
    assert call(Interrupts()) == table and "making the state" not in capsys.readouterr().err


def test_a_sweep_without_a_point_is_a_mistake_and_one_of_the_config_alone_is_said(tmp_path, monkeypatch):
    """A grid from which a filter took everything trained the config once, and the table looked like that of a sweep."""
    trained = []
    train = lambda runs, callbacks: trained.extend(run.folder.name for run in runs) or ""  # noqa: E731
    monkeypatch.setattr("xfresearch.studies.sweep._train_all", train)
    for grid, text in (({}, r"grid={} is not allowed: .*; \[{}\] trains the config"), ([], "must have one run or more")):
        with pytest.raises(xf.UserError, match=text):
            xf.sweep("gpt2:tiny", grid, workdir=str(tmp_path))
    assert not trained and xf.sweep("gpt2:tiny", [{}], workdir=str(tmp_path), seeds=2) == []
    assert trained == ["seed-0", "seed-1"]


def test_the_names_are_functions_whatever_commands_are_imported():
    code = "import xfresearch as xf, xfresearch.train, xfresearch.compare; from xfresearch import train; "
    code += "print(xf.train is train, xf.train.__module__, xf.compare.__name__, 'jax' in __import__('sys').modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "xfresearch.train", "compare", "False"]


def test_rows_have_columns_and_a_text():
    rows = Rows([{"kind": "a", "loss": 1.5}, {"kind": "b", "loss": None, "router": {"x": [1]}}])
    np.testing.assert_array_equal(rows["loss"], [1.5, np.nan])
    assert rows["kind"].tolist() == ["a", "b"] and rows.columns == ["kind", "loss", "router"]
    assert rows.where(kind="b") == [rows[1]] and isinstance(rows[:1], Rows)
    assert repr(rows).splitlines() == ["kind    loss", "   a  1.5000", "   b        "]
    assert "<td>1.5000</td>" in rows._repr_html_() and "router" not in rows._repr_html_()
    many = Rows({"step": n} for n in range(30))
    assert len(repr(many).splitlines()) == 22 and "10 more rows" in repr(many) and repr(Rows()) == "no rows"
    with pytest.raises(KeyError, match="the columns are kind, loss"):
        rows["los"]


def rows(workdir, without=("unix_seconds", "seconds", "tokens_per_second", "model_flops_utilisation")) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in without} for row in read_metrics(workdir / "metrics.jsonl")]


def test_every_hook_is_called_in_order(run):
    seen = run.recorder
    kinds = [(call[0], *call[1:2]) if call[0] not in ("on_outline", "on_start") else call[:1] for call in seen.calls]
    step = lambda n: [("on_step", n), ("on_row", n)] if n % 2 == 0 else [("on_step", n)]  # noqa: E731
    evaluated = lambda n: [("on_row", n), ("on_evaluation", n)]  # noqa: E731
    expected = [("on_outline",), ("on_start",), *step(1), *step(2), *evaluated(2), *step(3), ("on_checkpoint", 3)]
    expected += [*step(4), *evaluated(4), *step(5), *step(6), *evaluated(6), ("on_checkpoint", 6), ("on_end", 6)]
    assert kinds == expected
    [[start]] = seen.of("on_start")
    assert (start.config, start.step, start.workdir) == (run.config, 0, run.workdir) and 0.9 < start.bytes_per_token < 1
    assert seen.of("on_checkpoint")[-1][1] == str(run.workdir / "checkpoints" / "6") and seen.of("on_end") == [(6, "")]


def test_hooks_see_numbers_and_never_arrays(run):
    for _, figures in [*run.recorder.of("on_step"), *run.recorder.of("on_evaluation")]:
        assert {type(value) for value in figures.values()} <= {int, float} and figures["loss"] > 0
    first = run.recorder.of("on_step")[0][1]
    assert first["tokens"] == 32 and first["learning_rate"] > 0 and {"gradient_norm", "tokens_per_second"} <= first.keys()
    written = rows(run.workdir, without=("unix_seconds",))
    assert [{"step": step, "kind": kind, **figures} for step, kind, figures in run.recorder.of("on_row")] == written


def test_the_best_evaluation_is_among_those_of_as_much_text(run):
    by_name = {step: figures for step, figures in run.recorder.of("on_evaluation")}
    losses = {step: figures["loss"] for step, figures in by_name.items()}
    assert by_name[6]["best_step"] == min((2, 4), key=losses.get) and by_name[6]["best_loss"] == min(losses[2], losses[4])
    assert by_name[2]["best_step"] == 2


@pytest.mark.parametrize("at", [("on_step", 1), ("on_evaluation", 2), ("on_checkpoint", 3)])
def test_a_callback_ends_a_run_that_then_resumes_as_if_it_had_never_stopped(run, tmp_path, at):
    config, whole = run.config, run.workdir
    after = Recorder()
    ended = loop.train(config, tmp_path, ByteTokenizer(), callbacks=[Recorder(at, StopTraining("enough")), after])
    assert (ended.stopped_by, ended.finished) == ("enough", False) and store.steps(tmp_path)[-1] == ended.step < 6
    assert ended.step - at[1] in (0, 1) and after.of("on_end") == [(ended.step, "enough")]
    resumed = Recorder()
    result = loop.train(config, tmp_path, ByteTokenizer(), callbacks=[resumed])
    assert result.finished and resumed.of("on_start")[0][0].step == ended.step and rows(tmp_path) == rows(whole)
    assert resumed.of("on_evaluation")[-1][1]["best_loss"] == run.recorder.of("on_evaluation")[-1][1]["best_loss"]


@pytest.mark.parametrize("hook", ["on_outline", "on_start"])
def test_a_callback_that_stops_before_the_first_update_ends_the_run_after_it(run, tmp_path, hook):
    def stop(*_):
        raise StopTraining("not today")

    stops, after = Callback(), Recorder()
    setattr(stops, hook, stop)
    ended = loop.train(run.config, tmp_path, ByteTokenizer(), callbacks=[stops, after])
    assert (ended.step, ended.stopped_by) == (1, "not today") and store.steps(tmp_path) == [1]
    assert after.of("on_end") == [(1, "not today")]


def test_an_error_that_the_caller_handles_is_no_reason_for_the_end(run, tmp_path):
    seen = Recorder()
    try:
        raise KeyError("of the caller")
    except KeyError:
        loop.train(run.config, tmp_path, ByteTokenizer(), callbacks=[seen])
    assert seen.of("on_end") == [(6, "")]


def test_an_error_of_a_callback_is_raised_after_the_state_is_saved(run, tmp_path):
    broken, other = Recorder(("on_step", 2), ZeroDivisionError("mine")), Recorder()
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        loop.train(run.config, tmp_path, ByteTokenizer(), callbacks=[broken, other])
    assert raised.traceback[-1].name == "_record" and store.steps(tmp_path) == [2]
    assert len(broken.of("on_step")) == 2 and broken.of("on_end") == []
    assert other.of("on_end") == [(2, "Recorder.on_step failed: ZeroDivisionError")]


def test_an_error_at_the_start_leaves_no_checkpoint(run, tmp_path):
    class Refuses(Callback):
        def on_start(self, start):
            raise xf.UserError("no account")

    other = Recorder()
    with pytest.raises(xf.UserError, match="no account"):
        loop.train(run.config, tmp_path, ByteTokenizer(), callbacks=[other, Refuses()])
    assert store.steps(tmp_path) == [] and other.of("on_end") == [(0, "UserError: no account")]


def test_a_failing_run_ends_its_callbacks_with_the_error(run, tmp_path):
    seen, config = Recorder(), replace(run.config, steps=9)
    config = replace(config, optimizer=replace(config.optimizer, learning_rate=1e30))
    shutil.copytree(run.workdir, tmp_path / "run")
    with pytest.raises(loop.Diverged):
        loop.train(config, tmp_path / "run", ByteTokenizer(), fork=True, callbacks=[seen])
    [(_, reason)] = seen.of("on_end")
    assert reason.startswith("Diverged: ")


def test_something_else_than_a_callback_is_refused(run, tmp_path):
    with pytest.raises(xf.UserError, match=r"callbacks\[0\]=.* is not allowed: it must be an xf.Callback"):
        loop.train(run.config, tmp_path, ByteTokenizer(), callbacks=[print])
