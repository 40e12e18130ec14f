"""Compiles programs with libtpu for TPUs that this machine does not have.

It uses a separate process, because a process cannot load a second device library.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.contracts.variants import ROOT
from xfresearch.planning.topologies import ENVIRONMENT


def compiled_by(module: str) -> dict:
    """The last line that `python -m module` prints, parsed as JSON. Skips the test if libtpu is not installed."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed, and only libtpu compiles for TPUs")
    command = [sys.executable, "-m", module]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def mesh_of(chips: str, count: int | None = None, **sizes: int):
    """A mesh over the first `count` devices of the topology `chips`; axes that `sizes` does not name have size 1."""
    from jax.experimental import topologies

    from xfresearch.sharding.mesh import device_mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name=chips).devices[:count]
    axes = ("data", "fsdp", "expert", "tensor", "context")
    return device_mesh({axis: sizes.get(axis, 1) for axis in axes}, devices, "auto")
