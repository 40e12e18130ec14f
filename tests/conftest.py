"""Settings and fixtures of all tests: JAX on the CPU by default, our warnings as errors, an empty cache, data that is not
in git."""

import atexit
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile hundreds of small programs and run each a few times, so fast compilation matters more than fast code.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):  # later versions lack the first flag; it more than halves compilation
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
elif "XLA_FLAGS" not in os.environ and not version("jaxlib").startswith(("0.11.", "0.12.")):
    # XLA ends the process at a flag that it does not know.
    tried = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=os.environ | {"XLA_FLAGS": FLAGS})
    if tried.returncode:
        print(f"warning: this JAX refuses {FLAGS}: the tests take longer without", file=sys.stderr)
        FLAGS = ""
os.environ.setdefault("XLA_FLAGS", FLAGS)
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it
    os.environ["XFRESEARCH_CACHE"] = tempfile.mkdtemp(prefix="xfresearch-tests-")
    # Tests compile the same small programs again and again. All workers and all commands that they start share them.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.environ["XFRESEARCH_CACHE"] + "/compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["XFRESEARCH_CACHE"], ignore_errors=True)
import jax  # noqa: E402 - it reads the variables above
from jax._src.interpreters import mlir  # noqa: E402

from tests.daily import daily  # noqa: E402
from tests.tiny_runs import CONFIGS, tiny_model  # noqa: E402

# For every program that it lowers, JAX makes an MLIR context. That takes half of the time of a small program, and more than
# half of its memory. One context can serve all.
mlir.make_ir_context = cache(mlir.make_ir_context)
gc.set_threshold(50_000, 20, 20)  # JAX keeps millions of objects that are no garbage: looking for it took 4 % of the time
COMPILED = "/jax/core/compile/backend_compile_duration"
counted = Counter()
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: counted.update([name]))
ROOT = Path(__file__).parent.parent
LONGEST = ("test_docs.py", "test_processes.py", "test_study.py", "test_stopping.py", "test_routing.py")


def pytest_configure(config):
    # Warnings from the code of other libraries are not errors.
    config.addinivalue_line("filterwarnings", r"error:::(xfresearch|tests)\b")


def pytest_unconfigure():
    """pytest collects garbage five times at the end, for warnings: with the objects of JAX that takes ten seconds."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Starts the files that take longest first, so that the workers end together. Raises UsageError if this version of
    pytest drops the groups that pytest-xdist adds to the names of tests: each worker would compute what a group shares."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if getattr(config.option, "loadgroup", False):
        for item in items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError("this version of pytest drops the groups of pytest-xdist (requirements/test.txt)")


def pytest_make_parametrize_id(val):
    """Names of cases that `pytest -k NAME` accepts: it refuses '=', quotes, commas, parentheses and spaces."""
    return re.sub(r"[^\w.:/+\[\]-]+", "-", val).strip("-") or None if isinstance(val, str) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Runs a test with the mark `covers`, and fails it if it does not set these options."""
    paths = [path for mark in item.iter_markers("covers") for path in mark.args]
    if not paths:
        return (yield)
    from tests.covers import checked

    with checked(paths):
        return (yield)


@pytest.fixture(autouse=True)
def settings_of_jax():
    """Resets the settings that commands and float64 models change for the whole process: the next test would have other
    initial values."""
    yield
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(autouse=True)
def programs_of_jax():
    """Drops compiled programs before there are too many: LLVM ends a process with 65,530 mappings of memory."""
    yield
    maps = Path("/proc/self/maps")
    if counted[COMPILED] > 100 and maps.exists():  # programs since the last count; a large one has hundreds of mappings
        counted.clear()
        if maps.read_bytes().count(b"\n") > 45_000:
            jax.clear_caches()


@pytest.fixture(scope="session")
def gpt2():
    return tiny_model("gpt2")


@pytest.fixture(scope="session", params=daily(["gpt2", "moe"], CONFIGS))
def lm(request):
    """A tiny model of each config that make_run knows. A file of tests may have its own `lm`."""
    return tiny_model(request.param)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets, which is next to the repository and never committed."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("real data (../shared/data) is not on this machine")
    return path


@pytest.fixture
def x64():
    """Enables 64-bit types in JAX."""
    with jax.enable_x64(True):
        yield
