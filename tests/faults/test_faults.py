"""A run resumes while its disk fails, and after crashes of the machine: nothing is lost, and the exit code is right.

Every system call below the run's directory and its cache is a place where the disk may fail. `long` fails each in turn,
with each error. The daily test takes some of the crashes.
"""

import errno
import json
import os
import subprocess
import sys
import tempfile

import pytest

from tests.faults.calls import library
from tests.training.processes import ROOT
from xfresearch.runtime.errors import MISTAKE, TRANSIENT

CODES = {errno.EIO: TRANSIENT, errno.ENOSPC: TRANSIENT, errno.ESTALE: TRANSIENT}
CODES |= {errno.EACCES: MISTAKE, errno.ENOSYS: MISTAKE}
FROM_NOW_ON = 10**9  # a count: all later calls fail too
DAILY_CRASHES = 40  # of so many parts of all crashes, one is tried every day


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """outcomes(cases): the answers of a worker, which lives as long as the module's tests."""
    shim = library(tmp_path_factory.mktemp("shim"))
    if shim is None:
        pytest.skip("no C compiler (cc), which builds tests/faults/interpose.c")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a sync costs nothing there
    with tempfile.TemporaryDirectory(dir=memory) as directory, tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.worker", directory],
            cwd=ROOT,
            env=os.environ | {"LD_PRELOAD": str(shim)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

        def answers(case: dict) -> list[dict]:
            print(json.dumps(case), file=worker.stdin, flush=True)
            collected = []
            for line in worker.stdout:
                if not line.strip():
                    return collected
                collected.append(json.loads(line))
            errors.seek(0)
            pytest.fail(f"the worker ended: {errors.read()[-3000:]}")

        yield lambda cases: [answer for case in cases for answer in answers(case)]
        worker.stdin.close()
        assert worker.wait(60) == 0


@pytest.fixture(scope="module")
def places(outcomes) -> dict[str, list[int]]:
    """{place: numbers of its calls} in a resumed run."""
    (answer,) = outcomes([{"first": 0, "count": 0, "error": 0}])
    assert answer["code"] == 0 and not answer["problems"]
    numbers = {}
    for number, place in enumerate(answer["places"]):
        numbers.setdefault(place, []).append(number)
    assert len(numbers) > 200 and {place.split()[0] for place in numbers} >= {"open", "read", "write", "fsync", "rename"}
    return numbers


def faults(places: dict, error: int, count: int) -> list[dict]:
    """A case for every place. Each error takes another of the place's calls."""
    share = list(CODES).index(error) / len(CODES)
    return [{"first": numbers[int(share * len(numbers))], "count": count, "error": error} for numbers in places.values()]


def require_promises(answers: list[dict]) -> None:
    """The run went on, or ended with the code of the error; the same command then lost nothing."""
    broken = []
    for answer in answers:
        code = answer.get("code", 0)
        allowed = [0, CODES.get(answer["case"].get("error"))]
        if answer["case"].get("count") == 1 and "a checkpoint could not be written" in answer["output"]:
            allowed.append(TRANSIENT)  # Orbax may hide a refusal, which has passed when we look for it
        wrong = [] if code in allowed else [f"exit code {code}: {answer['output'][-300:]}"]
        if wrong or answer["problems"]:
            broken.append(f"{answer.get('failed') or answer.get('after')} {answer['case']}: {wrong + answer['problems']}")
    assert not broken, f"{len(broken)} of {len(answers)}:\n" + "\n".join(broken[:10])


def test_a_resumed_run_survives_a_crash_that_loses_what_was_not_synced(outcomes):
    answers = outcomes([{"part": 1, "of": DAILY_CRASHES}])
    assert len(answers) >= 3
    require_promises(answers)


@pytest.mark.long
@pytest.mark.parametrize("error", CODES, ids=errno.errorcode.get)
def test_every_place_may_fail_once(outcomes, places, error):
    require_promises(outcomes(faults(places, error, 1)))


@pytest.mark.long
def test_a_disk_may_fail_at_every_place_and_from_there_on(outcomes, places):
    kinds = list(CODES)
    cases = [case for k, error in enumerate(kinds) for case in faults(places, error, FROM_NOW_ON)[k :: len(kinds)]]
    assert len(cases) == len(places)
    require_promises(outcomes(cases))


@pytest.mark.long
def test_every_crash_that_loses_what_was_not_synced(outcomes):
    answers = outcomes([{"part": 0, "of": 1}])
    assert len(answers) > 100
    require_promises(answers)
