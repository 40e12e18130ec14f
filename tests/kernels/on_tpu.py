"""Programs for TPUs that are not here: compiled by libtpu, in a process of its own, since a library of devices cannot be
loaded beside another's."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.contracts.variants import ROOT
from xfresearch.planning.topologies import ENVIRONMENT


def compiled_by(module: str) -> dict:
    """What `python -m module` prints last, as JSON. Skips where there is no libtpu."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: nothing here compiles for a TPU")
    command, environment = [sys.executable, "-m", module], os.environ | ENVIRONMENT
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def mesh_of(chips: str, count: int | None = None, **sizes: int):
    """A mesh of those `sizes` (1 where an axis is not named) over the first `count` devices of a topology."""
    from jax.experimental import topologies

    from xfresearch.sharding.mesh import device_mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name=chips).devices[:count]
    axes = ("data", "fsdp", "expert", "tensor", "context")
    return device_mesh({axis: sizes.get(axis, 1) for axis in axes}, devices, "auto")
