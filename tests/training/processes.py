"""Starts one command as several processes on this machine, as launch scripts do on several machines, and reads the
directory of a small run."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from xfresearch.checkpoints import store

ROOT = Path(__file__).parent.parent.parent
HEARTBEAT = 6  # seconds of silence after which a process counts as lost


def flags(cache, *overrides: str, steps: int) -> list[str]:
    """The config of a small run of `steps` updates as flags, with its text in `cache`."""
    keys = {
        "steps": steps,
        "batch_size": 8,
        "checkpoint.every": 4,
        "checkpoint.keep": 3,
        "evaluation.every": 6,
        "evaluation.sequences": 11,
        "evaluation.final_sequences": 11,
        "log.tracker": "jsonl",
        "model.dropout": 0.1,
        "model.vocab_size": 258,
        "model.depth": 1,
        "data.corpus": f"('text_files:{ROOT}/xfresearch/models/*.py',)",
        "data.cache_dir": cache,
    }
    return ["--config=configs/gpt2.py:tiny", *(f"--config.{key}={value}" for key, value in keys.items()), *overrides]


def curve(workdir) -> list[dict]:
    """The rows of metrics.jsonl without times, which no two runs share."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


def rows_written(workdir) -> int:
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def digests(workdir, step: int) -> dict:
    """Digests of every array of a checkpoint. Equal bits have equal digests."""
    return json.loads((store.directory(workdir) / str(step) / "meta" / "metadata").read_text())["digests"]


def copied_back_to(step: int, source, target):
    """A copy of a run, as if it had been killed after the checkpoint of `step`."""
    shutil.copytree(source, target)
    for later in store.steps(target):
        if later > step:
            shutil.rmtree(store.directory(target) / str(later))
    return target


def free_port() -> int:
    """A port below those that the kernel gives to connections (from 32768 on): so no connection takes it before a process
    listens there."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as chosen, suppress(OSError):
            chosen.bind(("localhost", port))
            return port


def slurm(count: int, index: int) -> dict[str, str]:
    """The variables that srun sets for each of `count` tasks on one machine."""
    own = {"STEP_NODELIST": "localhost", "NTASKS": count, "PROCID": index, "LOCALID": index, "JOB_ID": 4711}
    return {f"SLURM_{name}": str(value) for name, value in own.items()}


def handles(number: int, process: subprocess.Popen) -> bool:
    """Whether the process has installed a handler for a signal."""
    caught = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


class Processes:
    """`count` processes of `python -m module arguments`, joined by flags or, with by="slurm", by the variables that
    srun sets. The end of a `with` block kills all of them."""

    def __init__(
        self, count: int, module: str, *arguments: str, by: str = "flags", devices: int = 1, heartbeat: int = HEARTBEAT
    ):
        port, command = free_port(), [sys.executable, "-m", module, *arguments]
        env = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_COORDINATOR_PORT": str(port)}
        env["JAX_NUM_CPU_DEVICES"] = str(devices)
        if count > 1:
            command.append(f"--heartbeat={heartbeat}")
        if count > 1 and by == "flags":
            command += [f"--coordinator=localhost:{port}", f"--processes={count}"]
        self.all = [
            subprocess.Popen(
                command + ([f"--process={index}"] if count > 1 and by == "flags" else []),
                cwd=ROOT,
                env=env | (slurm(count, index) if by == "slurm" else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(count)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.all:
            process.kill()

    def __getitem__(self, index: int) -> subprocess.Popen:
        return self.all[index]

    def until(self, condition) -> None:
        """Waits for `condition()`. Fails if a process ends before."""
        end = time.time() + 120
        while not condition():
            for process in self.all:
                assert process.poll() is None, process.communicate()[1][-3000:]
            assert time.time() < end
            time.sleep(0.01)

    def finish(self, timeout: float = 240) -> list[tuple[int, str, str]]:
        """Waits for all processes. (exit code, standard output, standard error) of each."""
        outputs = [process.communicate(timeout=timeout) for process in self.all]
        return [(process.returncode, *texts) for process, texts in zip(self.all, outputs, strict=True)]

    def succeed(self, code: int = 0) -> list[tuple[int, str, str]]:
        """Like `finish`, and requires this exit code from all."""
        ended = self.finish()
        assert [each for each, _, _ in ended] == [code] * len(ended), [err[-1500:] for _, _, err in ended]
        return ended
