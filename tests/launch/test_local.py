"""launch/local.sh with small commands: flags, line prefixes, exit codes, failures, signals."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.stand_ins import ROOT, WORDS
from xfresearch.training.metrics import read_metrics

SHOW = "import sys; print(*sys.argv[1:])"
FLAGS = "--coordinator 127.0.0.1:{port} --processes {n} --process {i}"
# All processes print "ready" and wait for a signal; `first` runs before the wait.
WAIT = """
import os, signal, sys, time
mine = sys.argv[sys.argv.index("--process") + 1]
def say(text):  # in one write: a signal may arrive inside print()
    os.write(1, text.encode() + b"\\n")
def end(number, frame):
    say("got " + signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, {handler})
signal.signal(signal.SIGINT, {handler})
say("ready")
{first}
time.sleep(60)
"""


def command(first: str = "", handler: str = "end") -> list[str]:
    return ["--", sys.executable, "-c", WAIT.format(first=first, handler=handler)]


def started(process, n: int) -> list[str]:
    """The lines of standard output until all `n` processes have printed "ready"."""
    lines = []
    while sum("ready" in line for line in lines) < n:
        lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()
    return lines


def test_every_process_gets_its_flags_and_its_lines_have_a_prefix(launcher):
    done = launcher.run("local.sh", "3", "--port", "4321", "--", "python", "-c", SHOW)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{i}] " + FLAGS.format(port=4321, n=3, i=i) for i in range(3)]


def test_every_word_of_a_command_reaches_the_process_as_it_is(launcher):
    show = f"import json, sys; print(json.dumps(sys.argv[1:{len(WORDS) + 1}]))"
    done = launcher.run("local.sh", "1", "--", sys.executable, "-c", show, *WORDS.values())
    assert json.loads(done.stdout.removeprefix("[0] ")) == list(WORDS.values())


def test_a_dry_run_prints_the_commands_of_a_real_run(launcher):
    dry = launcher.run("local.sh", "2", "--port", "4321", "--dry-run", "--", "python", "-c", SHOW)
    for i, line in enumerate(dry.stdout.splitlines()):
        assert shlex.split(line) == [
            "env",
            "JAX_PLATFORMS=cpu",
            "python",
            "-c",
            SHOW,
            *FLAGS.format(port=4321, n=2, i=i).split(),
        ]
    assert len(dry.stdout.splitlines()) == 2


def test_without_a_command_it_trains_the_quickstart_at_a_free_port(launcher):
    lines = launcher.run("local.sh", "2", "--dry-run").stdout.splitlines()
    ports = {int(re.search(r"127\.0\.0\.1:(\d+)", line)[1]) for line in lines}
    assert len(lines) == 2 and len(ports) == 1 and ports.pop() > 1023
    assert all("xfresearch.train --config configs/quickstart.py --workdir runs/quickstart-2" in line for line in lines)


def test_stdout_and_stderr_of_a_process_are_shown(launcher):
    done = launcher.run("local.sh", "1", "--", "python", "-c", "import sys; print('out'); print('err', file=sys.stderr)")
    assert sorted(done.stdout.splitlines()) == ["[0] err", "[0] out"]


@pytest.mark.parametrize("code", [1, 2, 17])
def test_a_failure_ends_the_other_processes_and_is_the_exit_code(launcher, code):
    begin = time.monotonic()
    done = launcher.run("local.sh", "3", *command(f"if mine == '1': sys.exit({code})"))
    assert done.returncode == code and time.monotonic() - begin < 20
    assert f"process 1 ended with status {code}" in done.stderr
    assert {"[0] got SIGTERM", "[2] got SIGTERM"} <= set(done.stdout.splitlines())


def test_the_exit_code_is_that_of_the_first_failure(launcher):
    first = "if mine == '1': sys.exit(5)"
    done = launcher.run("local.sh", "2", *command(first, handler="lambda *a: sys.exit(9)"))
    assert done.returncode == 5


def test_processes_that_do_not_end_are_killed_after_the_grace_period(launcher):
    begin = time.monotonic()
    done = launcher.run("local.sh", "2", "--grace", "1", *command("if mine == '1': sys.exit(3)", "signal.SIG_IGN"))
    assert done.returncode == 3 and time.monotonic() - begin < 20
    assert "process 0 is still running after 1 s: killed" in done.stderr


# Two processes with crash-log monitors, like xfresearch commands. Process 1 is killed, process 0 ignores SIGTERM.
MONITORED = """
import os, signal, sys, time
from xfresearch.runtime import crash_log
mine = int(sys.argv[sys.argv.index("--process") + 1])
crash_log.start_monitor(mine, 2, sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", file=sys.stderr, flush=True)
if mine: time.sleep(1), os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def test_killed_processes_leave_an_error_line_and_a_log(launcher, tmp_path):
    done = launcher.run("local.sh", "2", "--grace", "1", "--", "python", "-c", MONITORED, str(tmp_path / "run"))
    assert done.returncode == 128 + signal.SIGKILL
    assert "process 0 is still running after 1 s: killed" in done.stderr
    for i in range(2):
        assert f"[{i}] [process {i}] stopped: process {i} of 2 was killed or crashed" in done.stdout
        assert "ready" in (tmp_path / "run" / "errors" / f"process-{i}.log").read_text()
    # local.sh has read all streams to the end, so the monitors have ended too.


def test_the_grace_period_is_long_enough_to_report_a_lost_process():
    from xfresearch.runtime import command, distributed

    parser = command.Parser()
    distributed.add_flags(parser)
    grace = re.search(r"\[grace\]=(\d+)", (ROOT / "launch" / "local.sh").read_text())
    assert int(grace[1]) >= parser.parse_args([]).heartbeat + distributed.DETECTION_SECONDS + distributed.ERROR_SECONDS


@pytest.mark.long
def test_a_surviving_process_reports_which_process_is_lost(launcher, tmp_path):
    flags = [
        "--config",
        "configs/quickstart.py",
        "--workdir",
        str(tmp_path / "run"),
        "--config.steps=5000",
        "--heartbeat=6",
    ]
    own_number = 'echo $$ > "$0/pid-${@: -1}"; exec python -m xfresearch.train "$@"'
    process = launcher.start("local.sh", "2", "--", "bash", "-c", own_number, str(tmp_path), *flags)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGKILL, out + err
    assert "[0] [process 0] stopped: process 1 of 2 is lost" in out and "killed" not in err
    assert (tmp_path / "run" / "errors" / "process-0.log").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_signals_are_forwarded_to_all_processes(launcher, number):
    process = launcher.start("local.sh", "2", *command())
    started(process, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert sorted(out.splitlines()) == [f"[{i}] got {number.name}" for i in range(2)]
    assert process.returncode == 0, err


@pytest.mark.long
def test_two_processes_train_like_one(launcher, tmp_path):
    train = ["python", "-m", "xfresearch.train", "--config", "configs/all_attention.py:tiny", "--workdir"]
    process = launcher.start("local.sh", "2", "--", *train, str(tmp_path / "two"))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    subprocess.run([sys.executable, *train[1:], str(tmp_path / "one")], cwd=ROOT, check=True, timeout=600)
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    losses = [[row["loss"] for row in rows if row["kind"] == "train"] for rows in (one, two)]
    assert len(losses[0]) > 10 and losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_second_signal_kills_all_processes(launcher):
    process = launcher.start("local.sh", "2", *command(handler="signal.SIG_IGN"))
    started(process, 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL
