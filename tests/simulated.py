"""Programs on simulated devices. They run in a process of their own: JAX fixes the number of devices when it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def results_on_devices(devices: int, *arguments: str, timeout: float | None = None):
    """Runs Python with the arguments on so many simulated CPU devices; returns the JSON that it prints."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
