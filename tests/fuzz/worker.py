"""Reads damaged inputs of some targets, under limits of time and memory; prints JSON.

    python -m tests.fuzz.worker FIRST TARGET=COUNT ...

Reads COUNT inputs of each target, from number FIRST on. Input number i of a target is the same in every run.
"""

import json
import random
import resource
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import CONTROL, REFUSALS, TARGETS
from xfresearch.runtime.terminal import one_line

SECONDS = 20  # for one input; most take milliseconds
MEMORY, HOSTILE = 2 << 30, 1 << 30  # bytes above those in use after the valid input was read; for an input that is made


class TooSlow(BaseException):
    pass


def main(first: int, counts: dict[str, int]) -> None:
    print(json.dumps({target: fuzz(target, range(first, first + count)) for target, count in counts.items()}))


def fuzz(target: str, numbers: range) -> dict:
    make, read, *hostile = TARGETS[target]
    collected = {"accepted": 0, "refused": 0, "failures": []}
    with tempfile.TemporaryDirectory() as directory:
        files = make(Path(directory))
        for file in files:
            read(file)  # the valid input
        _limit_memory(HOSTILE if hostile else MEMORY)
        whole = {file: file.read_bytes() for file in files}
        for number in numbers:
            file = random.Random(number).choice(files)
            seed = f"{target} {number}"
            file.write_bytes(hostile[0](random.Random(seed)) if hostile else mutate(whole[file], seed))
            outcome, text = _outcome(lambda file=file: read(file))
            if outcome == "failures":
                collected["failures"].append([number, text])
            else:
                collected[outcome] += 1
            file.write_bytes(whole[file])
    return collected


def _limit_memory(most: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])  # of the address space
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + most, hard))


def _outcome(read) -> tuple[str, str]:
    def too_slow(*_):
        raise TooSlow(f"still running after {SECONDS} s")

    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(SECONDS)
    try:
        read()
        return "accepted", ""
    except REFUSALS as error:
        shown = one_line(f"error: {error}")  # as commands print it
        if CONTROL.search(shown):
            return "failures", f"a control character: {shown!r}"
        return ("failures", f"a message of several lines: {error}") if "\n" in str(error) else ("refused", str(error))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return "failures", traceback.format_exc()[-1500:]
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), {target: int(count) for target, count in (word.split("=") for word in sys.argv[2:])})
