"""SIGTERM at every point of the training loop, in fresh and resumed runs, in one process and in two.

A run that is stopped saves the step that it says, exits with 143, and the same command continues it bit for bit. An
evaluation that the signal interrupts is left to that command, also if it comes after the last update. A signal after that
changes nothing: the run finishes with 0. A signal before the run handles signals, or after that, ends the process and loses
nothing.

One process gets the signal before every line of the functions in EVERY_LINE that is executed while the run handles
signals; the rest of the loop only computes and prints. Two processes need longer, so they get it at POINTS: nothing that
matters to a signal happens between two of these.
"""

import inspect
import json
import math
import re
import signal
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tests.training.processes import Processes, copied_back_to, curve, digests, flags
from tests.training.stopping_worker import OFFSET, TRACED
from xfresearch.checkpoints import store
from xfresearch.training import loop, stopping

STEPS = {1: 30, 2: 62}  # updates of a run of one process and of two
FRESH, MIDDLE, LEFT = 0, 32, 2  # chains of two start at FRESH or MIDDLE, and some runs when LEFT updates are left
HEARTBEAT = 30  # seconds of silence after which a process counts as lost: a busy machine may pause one for some seconds
STOPPED = 128 + signal.SIGTERM
SOURCE = {n * OFFSET + number: line
          for n, module in enumerate((loop, stopping))
          for number, line in enumerate(inspect.getsource(module).splitlines(), 1)}  # fmt: skip


def at(text: str, execution: int = 1) -> tuple[int, int]:
    """The point before the line of TRACED that contains `text` is executed for that many-th time."""
    [line] = [number for number, line in SOURCE.items() if text in line]
    return line, execution


def lines(code) -> range:
    """The lines of a function or class."""
    source, first = inspect.getsourcelines(code)
    first += TRACED[inspect.getsourcefile(code)]
    return range(first, first + len(source))


EVERY_LINE = (loop.train, *(getattr(loop.Trainer, name) for name in ("measure", "evaluate", "save")))
EVERY_LINE += (stopping.StopSignal, stopping.until)
HANDLED = lines(stopping.StopSignal.__init__)[-1]  # from the line after it on, one process handles signals
RESTORED = lines(stopping.StopSignal.restore)[-1]  # until this line
ASKS, INTERRUPTED = at("stop = stopping.reached()")[0], at("raise Interrupted")[0]
POINTS = [
    at("self.bytes_per_token ="),  # the first line after which SIGTERM is a notice to all processes
    at("self.checkpoints = store.Checkpoints"),
    at("step_function = alone_at_first("),
    at("stopping = PreemptionNotice()"),
    at("if multihost_utils.reached_preemption_sync_point("),
    at("metrics = run.update(", 2),
    at("saving = run.checkpoints.due(", 2),
    at("values = summary("),
    at("if stopping and stopping.reached():", 2),  # in an evaluation
    at('with self.clock.measure("checkpoint")', 2),  # at the end of the block: after Orbax has begun to save
]
# In a run with LEFT updates left: in the last update before and after the run asks for a signal, and after the loop.
ENDS = [at("metrics = run.update(", 2), at("saving = run.checkpoints.due(", 2), at("run.save(done, loss)")]
ENDS += [at("for index, batch in", 3), at("run.checkpoints.wait()"), at("run.clock.end()"), at("stopping.restore()")]
ENDS += [(RESTORED, 1)]
# Before one process handles signals, and after that. The signal ends the process.
OUTSIDE = [at("step_function = alone_at_first("), (HANDLED, 1), at("run.checkpoints.close()")]
OUTSIDE += [at("return run.result(stopped_by")]
NO_SIGNAL, NEVER = [], [0, 0]  # with NEVER, the lines of the run are recorded


class Ended(NamedTuple):
    """The end of a process of stopping_worker.py."""

    code: int
    results: list[SimpleNamespace]  # of its runs
    said: list[int]  # the steps that its runs said they saved when they were stopped
    stderr: str


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def train(count: int, runs: list, cache) -> list[Ended]:
    """Does `runs`, each [workdir, point, process that gets the signal], one after another in `count` processes."""
    planned = json.dumps([[str(workdir), point, process] for workdir, point, process in runs])
    overrides = [f"--config.checkpoint.keep_every={MIDDLE}", *(["--config.mesh.fsdp=2"] if count > 1 else [])]
    arguments = [f"--runs={planned}", *flags(cache, *overrides, steps=STEPS[count])]
    with Processes(count, "tests.training.stopping_worker", *arguments, heartbeat=HEARTBEAT) as processes:
        finished = processes.finish(timeout=900)
    ends = []
    for code, _, err in finished:
        found = [SimpleNamespace(**json.loads(text)) for text in re.findall("RESULT (.*)", err)]
        said = re.findall(r"SIGTERM: saved step (\d+); the same command resumes from there", err)
        ends.append(Ended(code, found, [int(step) for step in said], err))
    return ends


def alone(runs: list, cache) -> list[SimpleNamespace]:
    """The results of `runs` in one process, which must survive them and say each step at which it was stopped."""
    [ended] = train(1, runs, cache)
    assert len(ended.results) == len(runs), (ended.code, ended.stderr[-3000:])
    assert ended.said == [result.saved for result in ended.results if result.code == STOPPED]
    return ended.results


def assert_same_run(workdir, other) -> None:
    assert store.steps(workdir)[-1] == store.steps(other)[-1]
    assert digests(workdir, store.steps(other)[-1]) == digests(other, store.steps(other)[-1])
    assert curve(workdir) == curve(other)


def update_at_signal(result, start: int) -> int:
    """The update after which a run from step `start` asks for the first time whether it got a signal: the one before if it
    asks no more, or if the signal interrupts its evaluation."""
    assert result.before is not None, "the run did not reach the point"
    before, after = result.executed[: result.before], result.executed[result.before :]
    asks = next((line for line in after if line in (ASKS, INTERRUPTED)), None) == ASKS
    return start + asks + before.count(ASKS)


@pytest.fixture(scope="module")
def one(tmp_path_factory, cache):
    """An uninterrupted run of one process, and the lines that it executed."""
    workdir = tmp_path_factory.mktemp("one")
    [result] = alone([(workdir, NEVER, 0)], cache)
    assert (result.code, result.saved) == (0, STEPS[1])
    return workdir, result.executed


def every_point(executed: list[int]) -> list[tuple[int, int]]:
    """A point for each line of EVERY_LINE that is executed between the start of handling signals and the end of the
    loop: in the second update if every update executes the line, otherwise the first time."""
    first, end = (len(executed) - executed[::-1].index(line) for line in (HANDLED, at("for index, batch in")[0]))
    before, during = Counter(executed[:first]), Counter(executed[first : end - 1])
    chosen = {line for code in EVERY_LINE for line in lines(code)}
    return [
        (line, before[line] + (2 if count >= STEPS[1] - 1 else 1)) for line, count in during.items() if line in chosen
    ]


@pytest.mark.parametrize("stride", [120, pytest.param(1, marks=pytest.mark.long)])
def test_one_process_stops_after_the_update_of_the_signal(one, cache, tmp_path, stride):
    """Several chains of runs. Each run of a chain resumes from the one before and is stopped; the last one finishes."""
    whole, executed = one
    points = every_point(executed)[::stride]
    count = math.ceil(len(points) / 7)  # a run has enough updates for a chain of seven
    chains = {tmp_path / str(number): points[number::count] for number in range(count)}
    runs = [(workdir, point, 0) for workdir, chain in chains.items() for point in [*chain, NO_SIGNAL]]
    start = Counter()
    for (workdir, point, _), result in zip(runs, alone(runs, cache), strict=True):
        stopped = (STOPPED, update_at_signal(result, start[workdir])) if point else (0, STEPS[1])
        assert (result.code, result.saved) == stopped, point
        start[workdir] = result.saved
    for workdir in chains:
        assert_same_run(workdir, whole)


def test_a_signal_during_the_last_evaluation_leaves_it_to_the_next_run(one, cache, tmp_path):
    """A finished run makes it again, because its checkpoint does not know of it, and has no row twice."""
    workdir = copied_back_to(STEPS[1] - LEFT, one[0], tmp_path / "run")
    point = at("if stopping and stopping.reached():", 2)
    results = alone([(workdir, each, 0) for each in (point, NO_SIGNAL, NO_SIGNAL)], cache)
    assert [result.code for result in results] == [STOPPED, 0, 0]
    assert {result.saved for result in results} == {STEPS[1]}
    assert_same_run(workdir, one[0])


@pytest.mark.long
def test_one_process_finishes_if_the_signal_comes_in_or_after_the_last_update(one, cache, tmp_path):
    """It stops once more if the signal comes before the end of the last evaluation."""
    runs = [(copied_back_to(STEPS[1] - LEFT, one[0], tmp_path / str(number)), point, 0) for number, point in enumerate(ENDS)]
    for (workdir, point, _), result in zip(runs, alone(runs, cache), strict=True):
        assert update_at_signal(result, STEPS[1] - LEFT) >= STEPS[1], point
        early = point in ENDS[:2]
        assert (result.code, result.saved) == (STOPPED if early else 0, STEPS[1]), point
        assert [ended.code for ended in alone([(workdir, NO_SIGNAL, 0)], cache)] == [0]
        assert_same_run(workdir, one[0])


@pytest.mark.long
@pytest.mark.parametrize("point", OUTSIDE, ids=lambda point: SOURCE[point[0] - 1].split("=")[0].strip())
def test_one_process_that_does_not_handle_signals_is_ended_and_loses_nothing(one, cache, tmp_path, point):
    workdir = copied_back_to(STEPS[1] - LEFT, one[0], tmp_path / "run")
    [ended] = train(1, [(workdir, point, 0)], cache)
    assert ended.code == -signal.SIGTERM, ended.stderr[-3000:]
    [result] = alone([(workdir, NO_SIGNAL, 0)], cache)
    assert result.code == 0
    assert_same_run(workdir, one[0])


@pytest.fixture(scope="module")
def two(tmp_path_factory, cache):
    """An uninterrupted run of two processes."""
    workdir = tmp_path_factory.mktemp("two")
    assert [ended.code for ended in train(2, [(workdir, NO_SIGNAL, 0)], cache)] == [0, 0]
    return workdir


def alternating(points, first: int) -> list:
    """(point, process that gets the signal) with processes `first`, the other one, `first`, ..."""
    return [(point, (number + first) % 2) for number, point in enumerate(points)]


CHAINS = [(MIDDLE, alternating(points, first)) for points in (POINTS[:5], POINTS[5:]) for first in (0, 1)]
CHAINS += [(FRESH, alternating([point], number % 2)) for number, point in enumerate(POINTS[::5])]


@pytest.mark.long  # test_processes.py stops a resumed run of two processes every day
@pytest.mark.parametrize("start, stops", CHAINS)
def test_two_processes_stop_after_the_same_update(two, cache, tmp_path, start, stops):
    """A chain of runs, as above. From MIDDLE on, fewer updates are left than are done: if JAX were told the step instead of
    the number of calls (see PreemptionNotice), it would answer after the last update."""
    workdir = copied_back_to(start, two, tmp_path / "run") if start else tmp_path / "run"
    for point, process in stops:
        ends = train(2, [(workdir, point, process)], cache)
        assert [ended.code for ended in ends] == [STOPPED] * 2, (point, [ended.stderr[-1500:] for ended in ends])
        [result], [other] = (ends[index].results for index in (process, 1 - process))
        assert update_at_signal(result, start) <= result.saved == other.saved < STEPS[2]
        start = result.saved
        assert ends[0].said == [start]
    assert [ended.code for ended in train(2, [(workdir, NO_SIGNAL, 0)], cache)] == [0, 0]
    assert_same_run(workdir, two)
    assert not (workdir / "errors").exists()


@pytest.mark.long
@pytest.mark.parametrize("point, process", alternating([ENDS[0], at("run.checkpoints.wait()")], 0))
def test_two_processes_finish_if_the_signal_comes_in_or_after_the_last_update(two, cache, tmp_path, point, process):
    workdir = copied_back_to(STEPS[2] - LEFT, two, tmp_path / "run")
    ends = train(2, [(workdir, point, process)], cache)
    code = STOPPED if point == ENDS[0] else 0  # before the last evaluation, or after it
    assert [ended.code for ended in ends] == [code] * 2, [ended.stderr[-1500:] for ended in ends]
    assert update_at_signal(ends[process].results[0], STEPS[2] - LEFT) >= STEPS[2]
    assert [ended.code for ended in train(2, [(workdir, NO_SIGNAL, 0)], cache)] == [0, 0]
    assert_same_run(workdir, two)
    assert not (workdir / "errors").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "point, process", alternating([at("distributed.handle_preemption(True)"), at("run.checkpoints.close()")], 0)
)
def test_two_processes_are_ended_by_a_signal_to_one_that_does_not_handle_it(two, cache, tmp_path, point, process):
    workdir = copied_back_to(STEPS[2] - LEFT, two, tmp_path / "run")
    ends = train(2, [(workdir, point, process)], cache)
    assert ends[process].code == -signal.SIGTERM, ends[process].stderr[-1500:]
    assert ends[1 - process].code not in (0, STOPPED)
    assert [ended.code for ended in train(2, [(workdir, NO_SIGNAL, 0)], cache)] == [0, 0]
    assert_same_run(workdir, two)
