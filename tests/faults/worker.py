"""Resumes one run again and again in this process, with injected faults and after crashes; prints a line of JSON for each.

    LD_PRELOAD=interpose.so python -m tests.faults.worker DIRECTORY < cases

A case is {"first": F, "count": C, "error": E}: system calls F to F + C - 1 of the resumed run fail with E; or {"part": P,
"of": N}: the machine crashes during the resumed run (crash.py), at every N-th moment from moment P on, a line of JSON for
each. Then the same command runs again without faults. An empty line follows the answers to a case.
"""

import contextlib
import faulthandler
import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults import crash
from tests.faults.calls import Call, watched
from tests.tiny_runs import ROOT
from xfresearch.checkpoints import store
from xfresearch.runtime import command
from xfresearch.train import main as train_main
from xfresearch.training import loop, report, session

STEPS = 6
STEPS_BEFORE = 2  # the run was killed after the checkpoint of this step
OPTIONS = {"steps": STEPS, "checkpoint.every": 2, "checkpoint.keep": 1, "optimizer.warmup": 0, "evaluation.every": 3}
OPTIONS |= {"evaluation.sequences": 4, "evaluation.final_sequences": 4, "model.depth": 1, "sequence_length": 32}
SECONDS = 120  # a run that takes longer hangs
SAVE_SECONDS = 2  # for threads that save after a run has failed; one whose save failed may wait forever
left = set()  # threads that wait forever
restored = []  # the steps that the runs of a case resumed from


def flags(directory: Path, *more: str) -> list[str]:
    corpus = f"('text_files:{ROOT}/xfresearch/models/*.py',)"
    given = OPTIONS | {"data.corpus": corpus, "data.cache_dir": directory / "cache"}
    overrides = [f"--config.{key}={value}" for key, value in given.items()]
    return [f"--config={ROOT}/configs/gpt2.py:tiny", f"--workdir={directory}/run", *overrides, *more]


def train_in(directory: Path, *more: str) -> tuple[int, str]:
    """Runs the training command. (exit code, standard error)"""
    output = io.StringIO()
    code = 0
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            command.run(train_main, flags(directory, *more))
        except SystemExit as ended:
            code = ended.code or 0
        except Exception as error:
            code = 1
            output.write(f"Traceback: {type(error).__name__}: {error}")
    faulthandler.cancel_dump_traceback_later()
    for thread in threading.enumerate():  # a process that ends kills them; here they would disturb the next run
        if thread.name in ("async_save", "save_finalize") and thread not in left:
            threading.Thread.join(thread, SAVE_SECONDS)  # Orbax's own `join` raises the error of the thread
            left.update({thread} if thread.is_alive() else ())
    return code, output.getvalue()


def results(directory: Path) -> dict:
    """What must equal the uninterrupted run: the curve and the last checkpoint's digests."""
    run = directory / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [{name: value for name, value in row.items() if "second" not in name} for row in rows]
    meta = json.loads((store.directory(run) / str(STEPS) / "meta" / "metadata").read_text())
    return {"curve": curve, "digests": meta["digests"], "newest": store.steps(run)[-1]}


def interrupted(directory: Path) -> dict:
    """Makes directory/killed, a run that was killed after its first checkpoint; the results of the uninterrupted run."""
    killed = directory / "killed"
    code, output = train_in(killed, "--config.checkpoint.keep=9")
    assert code == 0, output
    expected = results(killed)
    for step in store.steps(killed / "run")[1:]:
        shutil.rmtree(store.directory(killed / "run") / str(step))
    return expected


def problems(directory: Path, code: int, output: str, expected: dict) -> list[str]:
    """Broken promises after a fault: of its own outcome, then of the same command without faults."""
    faults = []
    if code not in (0, 2, 75):
        faults.append(f"exit code {code}")
    if "Traceback" in output:
        faults.append("a stack trace")
    code, again = train_in(directory)
    if code:
        return [*faults, f"the next start ends with {code}: {again[-300:]}"]
    now = results(directory)
    differing = [name for name in now if now[name] != expected[name]]
    faults += [f"{name} differ: {now[name]} instead of {expected[name]}"[:600] for name in differing]
    if not restored:
        faults.append("the run began again")
    if (directory / "run" / "damaged").exists():
        faults.append(f"moved to damaged/: {sorted(path.name for path in (directory / 'run' / 'damaged').iterdir())}")
    return faults


def main(directory: Path) -> None:
    command._exit_now = sys.exit
    expected = interrupted(directory)
    for number, line in enumerate(sys.stdin):
        case = json.loads(line)
        answers = crashes(directory / "crashed", expected, **case) if "part" in case else [
            fault(directory / f"case-{number}", expected, **case)
        ]
        for answer in answers:
            print(json.dumps({"case": case} | answer))
        print(flush=True)


def fault(target: Path, expected: dict, first: int, count: int, error: int) -> dict:
    """The outcome of a resumed run in which system calls `first` to `first + count - 1` fail with `error`."""
    shutil.copytree(target.parent / "killed", target)
    restored.clear()
    with watched(target, first, count, error) as recording:
        code, output = train_in(target)
    failed = [call.place(target) for call in recording.calls if call.result == error] if count else []
    answer = {"code": code, "output": output[-400:], "problems": problems(target, code, output, expected)}
    shutil.rmtree(target)
    return answer | {"failed": failed[:1], "places": [] if count else [call.place(target) for call in recording.calls]}


def crashes(target: Path, expected: dict, part: int, of: int) -> Iterator[dict]:
    """The outcomes of every `of`-th crash of a resumed run."""
    shutil.copytree(target.parent / "killed", target)
    with watched(target) as recording:
        code, output = train_in(target)
    assert code == 0, output
    shutil.rmtree(target)
    shutil.copytree(target.parent / "killed", target)
    result = list(crash.states(target, recording.calls))
    for calls, way, state in result[part::of]:
        shutil.rmtree(target)
        crash.rebuild(state)
        restored.clear()
        broken = problems(target, 0, "", expected)
        durable = durable_step(target, recording.calls[:calls])
        if max(restored, default=0) < durable:
            broken.append(f"resumed from {restored} although step {durable} was on the disk")
        last = recording.calls[calls - 1].place(target)
        yield {"after": f"{calls} {last}", "way": way, "problems": broken}
    shutil.rmtree(target)


def durable_step(target: Path, calls: list[Call]) -> int:
    """The newest checkpoint whose name was on the disk after `calls`."""
    newest = renamed = STEPS_BEFORE
    folder = store.directory(target / "run")
    for call in calls:
        if call.name.startswith("rename") and Path(call.other).parent == folder and not call.result:
            renamed = int(Path(call.other).name)
        if call.name == "fsync":
            newest = renamed
    return newest


def save_time() -> None:
    """Traces and compiles once, since every run has the same programs; tries to read again without a pause."""
    store.RETRY_SECONDS = (0,) * len(store.RETRY_SECONDS)
    loop.fitting_program = once(loop.fitting_program)
    report.charts = once(report.charts)
    session.draw_samples = lambda *_: []


def recorded(restore: Callable) -> Callable:
    """`restore`, which also adds the step to `restored`."""

    def call(workdir, step, abstract):
        result = restore(workdir, step, abstract)
        restored.append(step)
        return result

    return call


def once(function: Callable) -> Callable:
    """`function`, which is called once: every later call returns the same."""
    results = []

    def call(*arguments):
        if not results:
            results.append(function(*arguments))
        return results[0]

    return call


if __name__ == "__main__":
    save_time()
    store.restore = recorded(store.restore)
    main(Path(sys.argv[1]).resolve())
    os._exit(0)  # a thread of a save that failed may wait forever; main has flushed
