"""test_stopping.py runs this, in one process or several: training runs that send SIGTERM to themselves at a point.

A point is (line, execution): just before that line of TRACED is executed for that many-th time. Lines of its second file are
counted from OFFSET on. A single process does several runs, one after another. At the end of each run that does not end the
process, it prints one line of JSON.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter

from tests.training.processes import ROOT
from xfresearch.checkpoints import store
from xfresearch.runtime import command, distributed
from xfresearch.train import main as train_main

OFFSET = 1000
TRACED = {str(ROOT / "xfresearch" / "training" / name): n * OFFSET for n, name in enumerate(("loop.py", "stopping.py"))}
NOTICE_SECONDS = 3  # JAX looks once a second for a signal: at the end of this pause, all processes have got the notice


class Tracer:
    """A trace function (sys.settrace) that records the executed lines of TRACED and sends SIGTERM at a point."""

    def __init__(self, point: tuple[int, int]):
        self.point = point
        self.executed = []
        self.before = None  # the number of lines executed before the signal
        self._counts = Counter()

    def __call__(self, frame, event, argument):
        offset = TRACED.get(frame.f_code.co_filename)
        if offset is None:
            return None  # the frame is not traced
        if event == "line":
            self._arrive(offset + frame.f_lineno)
        return self

    def _arrive(self, line: int) -> None:
        self._counts[line] += 1
        if (line, self._counts[line]) == self.point:
            self.before = len(self.executed)
            os.kill(os.getpid(), signal.SIGTERM)
            if distributed.is_active():
                time.sleep(NOTICE_SECONDS)
        self.executed.append(line)


def run(workdir: str, point: list[int], arguments: list[str]) -> int:
    """Trains in `workdir`, with a signal at `point`; with [] for no signal. Returns the exit code."""
    tracer = Tracer(tuple(point))
    code = 0
    sys.settrace(tracer if point else None)
    try:
        command.run(train_main, [f"--workdir={workdir}", *arguments])
    except SystemExit as end:
        code = end.code
    finally:
        sys.settrace(None)
    result = {"code": code, "saved": store.steps(workdir)[-1], "executed": tracer.executed, "before": tracer.before}
    print(f"RESULT {json.dumps(result)}", file=sys.stderr, flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--runs", type=json.loads, help="JSON list of [workdir, point, process that gets the signal]")
    options, arguments = parser.parse_known_args()
    parser.add_argument("--process", type=int, default=0)
    own = parser.parse_known_args()[0].process
    codes = [run(workdir, point if process == own else [], arguments) for workdir, point, process in options.runs]
    return codes[-1]


if __name__ == "__main__":
    sys.exit(main())
