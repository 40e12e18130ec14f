"""What continuous integration runs: it finds a newer Python, if there is one."""

import subprocess

import pytest

from tests.contracts.variants import ROOT

SHIM = "echo 'pyenv: command not found' >&2; exit 127"  # of a version that is installed but not active


def answer(version: str) -> str:
    return f"cat > /dev/null; echo '{version.replace('.', ' ')} /found/{version}'"


@pytest.mark.parametrize(
    "pythons, found",
    [
        ({"python3.13": SHIM, "python3": "exit 0"}, ""),
        ({"python3.97": answer("3.97.4"), "python3.98": answer("3.98.0"), "python3.99": SHIM}, "/found/3.98.0\n"),
        ({"python3.9": answer("3.9.1"), "python3.100": answer("3.100.0"), "python3.98": SHIM}, "/found/3.100.0\n"),
    ],
)
def test_the_newest_python_that_runs_is_found(tmp_path, pythons, found):
    for name, script in pythons.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    for tool in ("bash", "cat", "cut", "env", "grep", "ls", "sort", "tail"):
        (tmp_path / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([ROOT / ".ci" / "newest-python"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, found, "")
