"""Stages of work on standard error."""

import io
import time

import pytest

from xfresearch.runtime import distributed, progress
from xfresearch.runtime.progress import amount, stage


def test_a_finished_stage_is_one_line_with_its_amount_and_time(capsys):
    with stage("reading notes", 3000) as running:
        running.update(1000)
        running.update(2000)
    assert capsys.readouterr().err.startswith("reading notes: 3 kB, 0.0 s\n")


def test_a_long_stage_reports_while_nothing_is_counted(capsys, monkeypatch):
    """Off a terminal: a line every SECONDS_BETWEEN_LINES, also while a library works and reports nothing."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.1)
    with stage("compiling", 2_000_000) as running:
        running.update(1_000_000)
        time.sleep(1.3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3 and lines[0].startswith("compiling: 1 MB of 2 MB, ") and " of " not in lines[-1]


def test_a_terminal_shows_a_bar_that_ends_as_a_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with stage("packing", Size(10), "rows") as running:
        running.update(5)
        time.sleep(0.8)
    assert "packing:  50%" in terminal.getvalue() and terminal.getvalue().endswith("packing: 5 rows, 0.8 s\n")


class Size(int):
    """As the sizes of tensorflow_datasets, which cannot be added to a float."""

    def __add__(self, other):
        return Size(super().__add__(other))


def test_only_the_outer_stage_and_only_process_0_prints(capsys, monkeypatch):
    with stage("outer"), stage("inner"):
        pass
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["outer"]
    monkeypatch.setattr(distributed, "first", lambda: False)
    with stage("elsewhere"):
        pass
    assert capsys.readouterr().err == ""


def test_a_stage_that_fails_prints_no_line_and_the_next_one_prints(capsys):
    with pytest.raises(ValueError), stage("failing"):
        raise ValueError
    with stage("next"):
        pass
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["next"]


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [(999, "B", "999 B"), (12_345, "B", "12.3 kB"), (4.9e9, "B", "4.9 GB"), (1200, "sequences", "1,200 sequences")],
)
def test_amounts(count, unit, text):
    assert amount(count, unit) == text
