"""Updates that another process times: the same model in PyTorch, or the same config with the code of another checkout.

The process prints a JSON object per line: first the figures of its start, then, for each line that it reads, the seconds
and the loss of one update (null if it decodes). After its input ends, it prints the figures of its end. With Python's flag
-P the files of this directory cannot hide modules of the same names.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from xfresearch.runtime.errors import UserError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]  # of this checkout
TORCH = ("torch", "torch_compile")


class Peer:
    """Each call runs one update in another process, and returns its seconds. `start` has the figures of the process's
    start."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]):
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe would stop the process when it is full
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=os.environ | environment, text=True, stdin=pipe, stdout=pipe, stderr=self._errors
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self.start = self._read()
        self.losses: list[float] = self.start.get("losses", [])

    def __call__(self) -> float:
        self._requests.write("update\n")
        self._requests.flush()
        row = self._read()
        self.losses.append(row["loss"])
        return row["seconds"]

    def end(self) -> dict:
        """The figures of its end. The process has ended, and its memory is free."""
        self._requests.close()
        answer = self._read()
        self.kill()
        return answer

    def kill(self) -> None:
        if not self._errors.closed:
            with self._process, self._errors:  # closes the pipes and waits for the process
                self._process.kill()

    def _read(self) -> dict:
        """The next JSON object. Raises UserError with the last line of the process's errors if it ended without one."""
        while line := self._answers.readline():
            if line.startswith("{"):
                return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read().strip().splitlines() or ["it printed nothing"]
        self.kill()
        raise UserError(f"--against={self.name}: the process ended: {errors[-1][:300]}")


def torch_peer(name: str, python: str, folder: Path) -> Peer:
    """The model in `folder` (torch_peer.py says what it holds), in PyTorch; compiled if `name` is torch_compile."""
    return Peer(name, [torch_python(python, name), "-P", str(HERE / "torch_peer.py"), str(folder), name], {})


def torch_python(python: str, name: str, modules: tuple[str, ...] = ("torch", "safetensors")) -> str:
    """The interpreter that imports PyTorch and the other modules. Raises UserError if there is none."""
    if not python:
        if all(map(importlib.util.find_spec, modules)):
            return sys.executable
        say = f"pip install {' '.join(modules)}, or name a Python that has it with --torch-python PYTHON"
        raise UserError(f"--against={name} needs PyTorch, which is not installed: {say}")
    try:
        done = subprocess.run([python, "-c", f"import {', '.join(modules)}"], capture_output=True, text=True)
        reason = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        raise UserError(f"--torch-python={python} is not allowed: it must import {' and '.join(modules)} ({reason})")
    return python


def checkout_root(path: str, names: tuple[str, ...] = TORCH) -> Path:
    """The checkout at `path`. Raises UserError if there is none."""
    root = Path(path).resolve()
    if not (root / "xfresearch" / "training" / "timing.py").is_file():
        raise UserError(f"--against={path} is not allowed: it must be {', '.join(names)} or the path of a checkout")
    return root


def checkout_peer(path: str, arguments: list[str]) -> Peer:
    """The config of these arguments with the code of the checkout at `path`.

    A first process compiles the program and gives the peer's compile_seconds; the peer reads the program from JAX's cache on
    disk. On a CPU, updates in a process that has compiled take longer than in one that reads the program.
    """
    root = str(checkout_root(path))
    command = [sys.executable, "-P", str(HERE / "checkout_peer.py"), root, *arguments]
    compiling = Peer(path, command, {"PYTHONPATH": root})
    compiling.kill()
    reading = Peer(path, command, {"PYTHONPATH": root})
    reading.start["compile_seconds"] = compiling.start["compile_seconds"]
    return reading
