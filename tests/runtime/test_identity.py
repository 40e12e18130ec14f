"""What identifies the code and the settings of a run."""

import shutil
import sys

import pytest

from xfresearch.runtime import identity


def test_a_copy_without_git_is_identified_and_two_edits_differ(tmp_path, monkeypatch):
    package = shutil.copytree(identity.PACKAGE, tmp_path / "xfresearch", ignore=shutil.ignore_patterns("__pycache__"))
    digests = [identity.source_digest()]
    monkeypatch.setattr(identity, "PACKAGE", package)
    assert identity.source_digest() == digests[0]
    (package / "configs" / "gpt2.py").write_text("# of a wheel\n")
    assert identity.source_digest() == digests[0], "a run has the digests of the configs that it reads"
    file = package / "training" / "step.py"
    for edit in ("# one\n", "# two\n"):
        file.write_text(file.read_text() + edit)
        digests.append(identity.source_digest())
    file.rename(file.with_name("steps.py"))
    assert len({*digests, identity.source_digest()}) == 4


def test_files_that_a_config_imports_are_those_of_the_user(tmp_path, monkeypatch):
    files = {
        "own.py": "import json, jax\nfrom xfresearch.runtime import errors\nfrom xfresearch.configs import common\n"
        "from package_of_a_config import used, name\n",
        "package_of_a_config/__init__.py": "name = 1\n",
        "package_of_a_config/used.py": "def f():\n    from . import deeper\n",
        "package_of_a_config/deeper.py": "",
        "package_of_a_config/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    from package_of_a_config import deeper, unused, used  # noqa: F401

    import xfresearch.configs.common  # noqa: F401

    result = identity.config_files(f"{tmp_path}/own.py:tiny")
    package = "package_of_a_config"
    configs = {"xfresearch.configs", "xfresearch.configs.common"}
    assert result.keys() == configs | {"own.py", package, f"{package}.used", f"{package}.deeper"}
    (tmp_path / package / "deeper.py").write_text("# edited\n")
    edited = identity.config_files(f"{tmp_path}/own.py:tiny")
    assert {name for name in result if result[name] != edited[name]} == {f"{package}.deeper"}
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


def test_settings_of_jax_that_decide_numbers_are_recorded():
    result = identity.jax_settings()
    deciding = {"default_prng_impl", "threefry_partitionable", "default_matmul_precision", "enable_x64"}
    assert {f"jax_{name}" for name in deciding} <= result.keys()
    harmless = {"compilation_cache_dir", "platforms", "log_compiles", "debug_nans", "traceback_filtering"}
    assert not {f"jax_{name}" for name in harmless} & result.keys()


@pytest.mark.parametrize(
    ("given", "deciding"),
    [
        ("", ""),
        ("--xla_b=2 --xla_a", "--xla_a=true --xla_b=2"),
        ("--xla_b=2  --xla_b=3", "--xla_b=3"),
        ("--xla_force_host_platform_device_count=8 --xla_dump_to='/a b' --xla_cpu_enable_fast_math=1", None),
        ("--xla_of_a_later_version=1", "--xla_of_a_later_version=1"),
    ],
)
def test_flags_of_xla_that_may_decide_numbers(given, deciding, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", given)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_a=1")
    expected = "--xla_cpu_enable_fast_math=1" if deciding is None else deciding
    assert identity.compiler_flags() == {"XLA_FLAGS": expected, "LIBTPU_INIT_ARGS": "--xla_tpu_a=1"}


def test_flags_in_a_file_count(tmp_path, monkeypatch):
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_dump_to=x\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    assert identity.compiler_flags()["XLA_FLAGS"] == "--xla_a=1"
