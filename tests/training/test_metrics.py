"""Rows and clock; a resumed run writes the same as an uninterrupted one."""

import errno
import json
import math
import os
import random

import numpy as np
import pytest

from tests.tolerances import TOLERANCE, relative_error
from xfresearch.runtime.errors import UserError
from xfresearch.training import metrics
from xfresearch.training.metrics import Clock, MetricsLog, bits_per_byte, read_metrics

NOW = 1e9


@pytest.fixture(autouse=True)
def same_time(monkeypatch):
    monkeypatch.setattr(metrics.time, "time", lambda: NOW)


def log_steps(directory, resume_step, first, last):
    log = MetricsLog(directory, resume_step)
    for step in range(first, last + 1):
        log.write(step, "train", {"loss": 8 / step, "norms": {"mlp": [0.5, np.float32(step)]}})
        if step % 4 == 0:
            log.write(step, "evaluation", {"loss": 9 / step})
    log.close()
    return (directory / "metrics.jsonl").read_text()


def test_rows_are_flushed_and_read_back(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(1, "train", {"loss": np.float32(2.5), "tokens": np.int64(7)})
    row = {"step": 1, "kind": "train", "unix_seconds": NOW, "loss": 2.5, "tokens": 7}
    assert read_metrics(tmp_path / "metrics.jsonl") == [row]


@pytest.mark.parametrize("checkpoint, killed", [(4, 4), (4, 7), (8, 11), (0, 3), (3, 9)])
def test_rows_of_a_resumed_run_equal_those_of_an_uninterrupted_one(tmp_path, checkpoint, killed):
    (tmp_path / "whole").mkdir(), (tmp_path / "broken").mkdir()
    whole = log_steps(tmp_path / "whole", 0, 1, 12)
    text = log_steps(tmp_path / "broken", 0, 1, killed)
    (tmp_path / "broken/metrics.jsonl").write_text(text + text[: random.Random(killed).randrange(len(text) // killed)])
    assert log_steps(tmp_path / "broken", checkpoint, checkpoint + 1, 12) == whole


def test_a_run_that_begins_again_has_no_row_twice(tmp_path):
    """A panel's first row is of step 0, before any checkpoint."""
    for _ in range(2):
        log = MetricsLog(tmp_path, -1)
        log.write(0, "panel", {"entropy": 1.0})
        log.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_an_error_of_a_bucket_is_a_warning(tmp_path, monkeypatch, capsys):
    """gcsfs raises errors of its own, such as HttpError, which are not OSErrors."""
    monkeypatch.setattr(metrics, "in_bucket", lambda path: True)
    log = MetricsLog(tmp_path, -1)
    with monkeypatch.context() as patch:
        patch.setattr(type(log._path), "write_bytes", raises(Exception("503: try later")))
        log.write(1, "train", {"loss": 2.0})
        log.sync()
    assert "metrics.jsonl cannot be written: 503: try later" in capsys.readouterr().err
    log.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def raises(error: Exception):
    """A function that raises `error`."""

    def call(*arguments):
        raise error

    return call


def test_rows_in_a_bucket_equal_those_on_a_disk(tmp_path, monkeypatch):
    whole = log_steps(tmp_path, 0, 1, 12)
    (tmp_path / "metrics.jsonl").unlink()
    monkeypatch.setattr(metrics, "in_bucket", lambda path: True)
    log_steps(tmp_path, 0, 1, 9)
    log = MetricsLog(tmp_path, 4)
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5  # rows of the four steps in the checkpoint
    log.write(5, "train", {"loss": 1.6})
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 4
    log.flush()
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 5
    assert log_steps(tmp_path, 4, 5, 12) == whole


DAMAGE = [b"\0" * 40, b"\xff\xfe{}", b"[" * 100_000, b'{"step": "4", "kind": "train"}', b'{"kind": "train"}', b"4"]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: repr(damage[:20]))
def test_damaged_lines_are_set_aside_and_the_others_kept(tmp_path, damage, capsys):
    (tmp_path / "whole").mkdir(), (tmp_path / "broken").mkdir()
    whole = log_steps(tmp_path / "whole", 0, 1, 12)
    lines = log_steps(tmp_path / "broken", 0, 1, 9).encode().splitlines(keepends=True)
    damaged = b"".join([*lines[:3], damage + b"\n", *lines[3:]])
    (tmp_path / "broken/metrics.jsonl").write_bytes(damaged)
    assert log_steps(tmp_path / "broken", 4, 5, 12) == whole
    assert (tmp_path / "broken/damaged/metrics.jsonl-0").read_bytes() == damaged
    assert "warning: moved " in capsys.readouterr().err


def test_a_full_disk_does_not_stop_the_run_and_loses_no_row(tmp_path, monkeypatch, capsys):
    """Writes fail, or write only a part, and later succeed."""
    write = os.write
    full = [True]

    def limited(file, content):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[:5])

    log = MetricsLog(tmp_path, 0)
    monkeypatch.setattr(metrics.os, "write", limited)
    for step in (1, 2, 3):
        full[0] = step < 3
        log.write(step, "train", {"loss": 1.0})
    log.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    error = f"warning: {tmp_path}/metrics.jsonl cannot be written: No space left on device\n"
    assert capsys.readouterr().err == error


def test_every_torn_last_line_is_left_out(tmp_path):
    text = log_steps(tmp_path, 0, 1, 4)
    last = text.rindex("\n", 0, -1) + 1
    for end in range(last, len(text)):
        (tmp_path / "metrics.jsonl").write_text(text[:end])
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    assert not list(tmp_path.glob(".*tmp"))


@pytest.mark.parametrize("damage", [*DAMAGE, b'{"step": 9, "kind": "train", "unix_seconds": null}'])
def test_the_time_of_the_last_row_is_known_whatever_follows_it(tmp_path, damage):
    log_steps(tmp_path, 0, 1, 4)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(damage + b'\n{"step": 10, "ki')
    assert metrics.last_written(tmp_path / "metrics.jsonl") == NOW


@pytest.mark.parametrize("bad", ["{", "[]", "3", '{"step": 1}'])
def test_a_bad_line_is_named(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kind": "train"}\n' + bad + "\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:2: "):
        read_metrics(tmp_path / "metrics.jsonl")


def test_numbers_that_are_not_finite_stay_json(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(1, "train", {"loss": float("nan"), "norms": [np.float32("inf"), 1.0], "note": "a", "ok": True})
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row.pop("unix_seconds") == NOW
    assert row == {"step": 1, "kind": "train", "loss": None, "norms": [None, 1.0], "note": "a", "ok": True}


NOTHING_ELSE = {"data": 0, "start": 0, "results": 0, "lost": 0, "down": 0}


def make_clock():
    times = {"now": 5.0}
    return times, Clock(now=lambda: times["now"])


def test_clock_counts_every_second_once():
    times, clock = make_clock()
    times["now"] += 100  # before training begins: not counted
    with clock.measure("compile"):
        times["now"] += 4
    clock.begin()
    times["now"] += 3
    with clock.measure("evaluation"):
        times["now"] += 1
        with clock.measure("input"):
            times["now"] += 2
    times["now"] += 6
    clock.set("input", 1.0)
    clock.set("input", 1.5)
    clock.end()
    times["now"] += 50  # a sample is written, baselines are fitted
    expected = {"step": 7.5, "input": 3.5, "evaluation": 1, "checkpoint": 0, "compile": 4} | NOTHING_ELSE
    assert clock.state() == {**expected, "tokens": 0}
    shares = clock.shares()
    assert relative_error([shares[kind] for kind in expected], [v / 16 for v in expected.values()]) < TOLERANCE["float64"]


def test_clock_closes_a_measure_that_raises():
    times, clock = make_clock()
    clock.begin()
    with pytest.raises(ZeroDivisionError), clock.measure("checkpoint"):
        times["now"] += 2
        1 / 0  # noqa: B018
    times["now"] += 1
    assert clock.state()["checkpoint"] == 2 and clock.state()["step"] == 1


def test_clock_continues_after_a_restart():
    def session(state):
        times, clock = make_clock()
        with clock.measure("compile"):
            times["now"] += 2
        clock.restore(state)
        clock.begin()
        for _ in range(5):
            times["now"] += 4
            clock.count(100)
        clock.set("input", 5.0)
        return clock

    clock = session(json.loads(json.dumps(session({}).state())))
    expected = {"step": 30, "input": 10, "evaluation": 0, "checkpoint": 0, "compile": 4} | NOTHING_ELSE
    assert clock.state() == {**expected, "tokens": 1000}
    assert clock.training_seconds() == 40 and clock.tokens_per_second() == 25 and clock.shares()["compile"] == 4 / 44


def test_rate_covers_the_last_updates_without_evaluation():
    times, clock = make_clock()
    clock.restore({"step": 1000.0, "tokens": 5})
    clock.begin()
    for update in range(50):
        times["now"] += 4 if update < 10 else 2
        clock.count(100)
        if update % 3 == 0:
            with clock.measure("evaluation"):
                times["now"] += 30
        rate = clock.rate()
        assert update != 0 or rate == 25
    assert rate == 50


def test_bits_per_byte():
    assert relative_error(bits_per_byte(math.log(256), 1.0), 8.0) < TOLERANCE["float64"]
