"""Peak FLOP/s by device, and a description of the machine without names of hosts or users."""

import getpass
import json
import platform
import subprocess

import numpy as np
import pytest

from tests.tolerances import TOLERANCE, relative_error
from xfresearch.runtime.hardware import NOT_TPUS, _tpu_attached, describe_machine, git_commit, peak_flops, versions

JAX_KINDS = ["TPU v4", "TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "TPU7x"]


@pytest.mark.parametrize("kind", JAX_KINDS)
def test_tpu_peaks_agree_with_jax(kind):
    """JAX's own table is per TensorCore and rounded. A v4 or v5p device has two TensorCores."""
    table = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    cores = 2 if kind in ("TPU v4", "TPU v5", "TPU v5p") else 1
    info = table.get_tpu_info_for_chip(table.chip_version_from_device_kind(kind), cores)
    assert relative_error(peak_flops(kind, "bfloat16"), info.bf16_ops_per_second * cores) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    "kind, tflops",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L40", None),
        ("TPU v9", None),
        ("cpu", None),
    ],
)
def test_peaks_by_the_device_names_of_drivers(kind, tflops):
    assert peak_flops(kind, "bfloat16") == (tflops and tflops * 1e12)


def test_peaks_by_dtype():
    import jax.numpy as jnp

    assert peak_flops("NVIDIA H200", "float32") == peak_flops("NVIDIA H200", "bfloat16") / 2
    assert peak_flops("TPU v5p", "float32") == peak_flops("TPU v5p", jnp.bfloat16) == 459e12
    assert peak_flops("TPU v5p", np.dtype("float64")) is None
    assert peak_flops("TPU v5p", np.dtype(jnp.bfloat16)) == 459e12


@pytest.mark.parametrize(
    "vendor, device, attached",
    [
        ("0x1ae0", "0x006f", True),
        ("0x1ae0", "0x9999", True),  # perhaps a TPU that is newer than this list
        ("0x1ae0", "0x0042", False),  # gVNIC, the network card of a Compute Engine machine
        ("0x10de", "0x0063", False),
    ],
)
def test_a_tpu_is_distinguished_from_other_google_devices(tmp_path, vendor, device, attached):
    for address, numbers in {"00:01.0": ("0x8086", "0x7110"), "00:04.0": (vendor, device)}.items():
        (tmp_path / address).mkdir()
        for name, number in zip(("vendor", "device"), numbers, strict=True):
            (tmp_path / address / name).write_text(f"{number}\n")
    assert _tpu_attached(tmp_path) == attached


def test_no_tpu_of_jax_is_taken_for_another_device():
    from jax._src import hardware_utils

    assert not set(NOT_TPUS) & set(hardware_utils._TPU_PCI_DEVICE_IDS)


def test_the_description_is_complete_and_has_no_host_or_user_name():
    machine = describe_machine()
    assert machine["cores"] >= 1 and machine["memory_gb"] > 0.1 and machine["cpu"] and machine["devices"]
    words = set(json.dumps(machine).replace('"', " ").split())
    assert platform.node() not in words and getpass.getuser() not in words


def test_versions_are_the_installed_ones():
    import jax

    assert versions()["jax"] == jax.__version__ and versions()["python"] == platform.python_version()
    assert all(versions().values())


def test_git_commit_of_a_checkout_marks_changes_as_dirty(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)

    assert git_commit(tmp_path) == ""
    git("init", "-q")
    assert git_commit(tmp_path) == ""
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py"), git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD").stdout.strip()
    assert git_commit(tmp_path) == commit
    (tmp_path / "inner").mkdir()
    assert git_commit(tmp_path / "inner") == ""
    (tmp_path / "docs" / "data").mkdir(parents=True)
    (tmp_path / "docs" / "data" / "figures.json").write_text("{}")
    assert git_commit(tmp_path) == commit
    (tmp_path / "new.py").write_text("2")
    assert git_commit(tmp_path) == commit + "-dirty"
