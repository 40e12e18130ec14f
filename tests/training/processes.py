"""Starts one command as several processes of this machine, as launch scripts do on several."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HEARTBEAT = 6  # seconds after which the runtime takes a process for lost


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("localhost", 0))
        return chosen.getsockname()[1]


class Processes:
    """`count` processes of `python -m module arguments`; all of them are killed at the end of a `with`."""

    def __init__(self, count: int, module: str, *arguments: str, devices: int = 1):
        env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        command = [sys.executable, "-m", module, *arguments]
        if count > 1:
            joining = f"--coordinator=localhost:{free_port()} --processes={count} --heartbeat={HEARTBEAT}"
            command += joining.split()
        self.all = [
            subprocess.Popen(
                command + ([f"--process={index}"] if count > 1 else []),
                cwd=ROOT,
                env=env,
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
        """Waits for `condition()` while all of them run."""
        end = time.time() + 120
        while not condition():
            for process in self.all:
                assert process.poll() is None, process.communicate()[1][-3000:]
            assert time.time() < end
            time.sleep(0.01)

    def finish(self, timeout: float = 240) -> list[tuple[int, str, str]]:
        """(exit code, standard output, standard error) of each, once all have ended."""
        said = [process.communicate(timeout=timeout) for process in self.all]
        return [(process.returncode, *texts) for process, texts in zip(self.all, said, strict=True)]

    def succeed(self) -> list[tuple[int, str, str]]:
        ended = self.finish()
        assert [code for code, _, _ in ended] == [0] * len(ended), [err[-1500:] for _, _, err in ended]
        return ended
