"""The table of flags of XLA: what is set on which chips, what the user has set stays, and the installed jaxlib has them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xfresearch.runtime import identity, xla_flags
from xfresearch.runtime.xla_flags import LIBTPU, TABLE, XLA, Flag

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(monkeypatch):
    """Environment variables that the test may change; nothing was set before."""
    for row in TABLE:
        monkeypatch.delenv(row.variable, raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(xla_flags, "_given", {})
    monkeypatch.setattr(xla_flags, "_set", [])
    monkeypatch.setattr(xla_flags, "unknown_to_xla", lambda rows: set())
    monkeypatch.setattr(xla_flags, "unknown_to_libtpu", lambda rows: set())
    return monkeypatch


def test_the_installed_jaxlib_has_every_flag_of_the_table_and_of_the_pages():
    assert xla_flags.unknown_to_xla([row for row in TABLE if row.variable == XLA]) == set()
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = {word for page in pages for word in re.findall(r"--(xla_(?!tpu)\w+)=(\w+)", page.read_text())}
    assert len(words) >= 4
    rows = [Flag(XLA, name, value, (), "", "") for name, value in words if not name.startswith("xla_enable_async")]
    assert xla_flags.unknown_to_xla(rows) == set()


def test_a_flag_that_jaxlib_does_not_have_is_found_before_xla_aborts():
    rows = [Flag(XLA, name, "true", (), "", "") for name in ("xla_gpu_enable_async_collectives", "xla_gpu_no_such_flag")]
    assert xla_flags.unknown_to_xla([*rows, TABLE[0]]) == {row.name for row in rows}


def test_a_flag_that_libtpu_does_not_have_is_found_in_its_library(tmp_path):
    library = tmp_path / "libtpu.so"
    library.write_bytes(b"\0xla_tpu_a\0xla_tpu_ab\0not_xla_tpu_c\0")
    rows = [Flag(LIBTPU, name, "1", (), "", "") for name in ("xla_tpu_a", "xla_tpu_b", "xla_tpu_c")]
    assert xla_flags.unknown_to_libtpu(rows, library) == {"xla_tpu_b", "xla_tpu_c"}
    assert xla_flags.unknown_to_libtpu(rows, tmp_path / "missing") == {"xla_tpu_a", "xla_tpu_b", "xla_tpu_c"}


@pytest.mark.parametrize("kind", ["GPUs", "v4", "v5e", "v5p", "v6e", "tpu7x", ""])
def test_each_kind_of_chip_has_its_flags(environment, kind):
    xla_flags.set_flags(kind)
    for row in TABLE:
        assert (row.text.partition("=")[2] in os.environ.get(row.variable, "")) >= (kind in row.chips)
        assert (row in xla_flags._set) == (kind in row.chips)
    assert ("--xla_tpu_scoped_vmem_limit_kib=98304" in os.environ.get(LIBTPU, "")) == (kind == "v6e")
    assert (XLA in os.environ) == (kind == "GPUs") == ("NCCL_PROTO" in os.environ)


def test_what_the_user_has_set_stays_and_is_what_a_run_records(environment):
    environment.setenv(XLA, "--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to='/a b'")
    environment.setenv("NCCL_PROTO", "SIMPLE")
    before = identity.compiler_flags()
    xla_flags.set_flags("GPUs")
    assert os.environ[XLA].startswith("--xla_gpu_enable_latency_hiding_scheduler=false --xla_dump_to='/a b' --xla_gpu_")
    assert os.environ[XLA].count("latency_hiding") == 1 and os.environ["NCCL_PROTO"] == "SIMPLE"
    assert identity.compiler_flags() == before and "combine" not in str(before)
    set_once = dict(os.environ)
    xla_flags.set_flags("GPUs")
    assert os.environ == set_once and "NCCL_PROTO" not in xla_flags.described()


def test_what_the_installed_version_lacks_is_left_out_with_a_warning(environment, capsys):
    name = "xla_gpu_enable_pipelined_all_gather"
    environment.setattr(xla_flags, "unknown_to_xla", lambda rows: {name})
    xla_flags.set_flags("GPUs")
    assert name not in os.environ[XLA] and "pipelined_all_reduce" in os.environ[XLA]
    warning = "warning: these flags are left out, because the installed version lacks them"
    assert capsys.readouterr().err == f"{warning}: {name}\n"


def test_nothing_is_set_for_the_cpu(environment):
    environment.setenv("JAX_PLATFORMS", "cpu")
    xla_flags.set_flags("GPUs")
    assert XLA not in os.environ


def test_chips_are_those_of_the_bus_or_several_gpus(tmp_path):
    bus, devices = tmp_path / "bus", tmp_path / "dev"
    devices.mkdir()
    assert xla_flags.chips(devices, bus) == ""
    for number, expected in ((0, ""), (1, "GPUs"), ("ctl", "GPUs")):
        (devices / f"nvidia{number}").touch()
        assert xla_flags.chips(devices, bus) == expected
    for number, device in enumerate(("0x001f", "0x006f")):  # a disk, then a v6e
        (bus / str(number)).mkdir(parents=True)
        (bus / str(number) / "vendor").write_text("0x1ae0\n")
        (bus / str(number) / "device").write_text(f"{device}\n")
        assert xla_flags.chips(devices, bus) == ("v6e" if number else "GPUs")


def test_a_command_sets_the_flags_before_jax_is_imported():
    code = "import sys; from xfresearch.runtime import command, xla_flags; "
    code += "xla_flags.set_flags = lambda: print('jax' in sys.modules); command.run(lambda arguments: None, [])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
