"""A child process with limits: what a library does there is one line here, and the next request is answered."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from xfresearch.runtime import confined
from xfresearch.runtime.confined import Exceeded, Failed


def ask(request: str, seconds: int = 20, memory: int = 1 << 26) -> list[bytes]:
    return [bytes(part) for part in confined.ask("tests.runtime.confined_programs", request.encode(), seconds, memory)]


@pytest.mark.parametrize(
    "request_, kind, reason",
    [
        ("memory 1000000000", Exceeded, "^it takes more than 20 s of processor time or 64 MiB of memory$"),
        ("abort", Failed, r"^the library that reads it failed \(SIGABRT\)$"),
        ("exit", Failed, r"^the library that reads it failed \(3\)$"),
        ("panic", Failed, r"^called `Option::unwrap\(\)` on a `None` value$"),
        ("refuse", Failed, "^two$"),
    ],
)
def test_a_failure_of_a_library_is_one_line_and_the_next_request_is_answered(request_, kind, reason):
    with pytest.raises(Failed, match=reason) as caught:
        ask(request_)
    assert caught.type is kind
    assert ask("memory 1000000") == [b"1000000"]


def test_an_endless_loop_is_ended_by_processor_time_and_a_process_that_only_waits_by_the_clock(monkeypatch):
    with pytest.raises(Exceeded, match="^it takes more than 1 s of processor time"):
        ask("loop", seconds=1)
    monkeypatch.setattr(confined, "_WAIT", 1)
    with pytest.raises(Exceeded, match="^it takes more than 1 s$"):
        ask("sleep", seconds=1)


def test_a_process_is_kept_for_the_next_request_unless_its_answer_was_left():
    (first,), (second,) = ask("number"), ask("number")
    assert first == second != str(os.getpid()).encode()
    parts = confined.ask("tests.runtime.confined_programs", b"loop", 20, 1 << 26)
    assert next(parts) == b"begun"
    parts.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)
    (third,) = ask("number")
    os.kill(int(third), signal.SIGKILL)  # while it waits for a request
    time.sleep(0.1)
    assert ask("number") != [third]


def test_limits_hold_for_each_request_alone():
    before = resource.getrlimit(resource.RLIMIT_AS)
    for _ in range(3):
        assert ask("memory 40000000") == [b"40000000"]
    assert ask("memory 400000000", memory=1 << 29) == [b"400000000"]
    with pytest.raises(Exceeded):
        ask("memory 400000000")
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_what_a_library_prints_is_no_part_of_an_answer(capfd):
    assert ask("print 3000000") == [b"", b"x" * 3_000_000]
    assert capfd.readouterr() == ("", "")


def test_a_child_imports_nothing_that_takes_long():
    (modules,) = ask("modules")
    assert not {"jax", "numpy", "etils", "site"} & set(modules.decode().split())


def test_no_child_outlives_its_parent():
    program = "from tests.runtime.test_confined import ask; print(ask('number')[0].decode(), flush=True)"
    for end in ("", "; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"):
        run = subprocess.run([sys.executable, "-W", "error", "-c", program + end], capture_output=True, text=True)
        assert not run.stderr
        time.sleep(0.2)
        state = subprocess.run(["ps", "-o", "stat=", "-p", run.stdout.strip()], capture_output=True, text=True).stdout
        assert state[:1] in ("", "Z")  # nobody may be there to take note of its end
