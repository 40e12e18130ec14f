"""The progress of a run on standard error: lines for a log file, and a bar for a terminal or a notebook."""

import io
import math
import sys
from types import SimpleNamespace

import pytest

from xfresearch.runtime import terminal
from xfresearch.training import console
from xfresearch.training.callbacks import Start
from xfresearch.training.console import Console


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def wall(monkeypatch):
    """A wall clock that the test sets."""
    times = {"now": 100.0}
    monkeypatch.setattr(console.time, "monotonic", lambda: times["now"])
    return times


def started(steps: int, step: int, bytes_per_token: float | None = 1.0) -> Console:
    shown = Console()
    shown.on_start(Start(SimpleNamespace(steps=steps), None, step, bytes_per_token))
    return shown


def figures(bits: float) -> dict:
    return {"loss": math.log(2) * bits, "tokens_per_second": 500.4, "tokens": 500}


def test_without_a_terminal_it_is_a_line_every_ten_seconds(monkeypatch, wall):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shown = started(100, 40, bytes_per_token=2.0)
    for step in range(41, 101):
        wall["now"] += 1.0
        shown.on_step(step, figures(3))
    shown.on_end(100, "")
    lines = sys.stderr.getvalue().splitlines()
    assert [line.split()[1].split("/")[0] for line in lines] == ["41", "51", "61", "71", "81", "91", "100"]
    assert lines[1] == "step 51/100  loss 2.079  1.500 bits/byte  500 tokens/s  00:49 left"
    assert "\r" not in sys.stderr.getvalue()


def test_a_held_out_loss_is_a_line_with_the_best_so_far_and_the_time_left(monkeypatch, wall):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shown = started(100, 40)
    shown.on_evaluation(40, {"loss": 3.0})
    wall["now"] += 30.0
    shown.on_step(70, figures(3))
    best = {"best_loss": 2.75, "best_step": 60}
    shown.on_evaluation(70, {"loss": 2.875, "bits_per_byte": 4.1, **best})
    lines = sys.stderr.getvalue().splitlines()
    assert lines[0] == "step 40/100  held-out loss 3.0000  ? left"
    assert lines[2] == "step 70/100  held-out loss 2.8750  4.100 bits/byte  best 2.7500 at step 60  00:30 left"


def test_on_a_terminal_it_is_one_bar_with_held_out_losses_above_it(monkeypatch, wall):
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown = started(4, 1)
    for step in (2, 3, 4):
        wall["now"] += 2.0
        shown.on_step(step, figures(1))
        if step == 3:
            shown.on_evaluation(3, {"loss": 0.5})
    shown.on_end(4, "")
    text = sys.stderr.getvalue()
    last = text.split("\r")[-1]
    assert "step 4/4" in last and "loss 0.693  1.000 bits/byte  500 tokens/s" in last and " left" in last
    assert "\rstep 3/4  held-out loss 0.5000  00:02 left\n" in text


def test_without_an_update_nothing_is_printed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    started(4, 4).on_end(4, "")
    assert sys.stderr.getvalue() == ""


def test_a_notebook_has_bars_although_its_standard_error_is_no_terminal(monkeypatch):
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert terminal.shows_bars()
    with terminal.bar(desc="scoring", total=3, disable=None) as bar:
        bar.update(2)
    assert "scoring:  67%" in sys.stderr.getvalue()
    shell.config = {"TerminalIPythonApp": {}}
    assert not terminal.shows_bars()
