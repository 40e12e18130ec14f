"""A run or a model that does not fit into memory ends in one line, before it waits for ever or the system kills it."""

import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import xfresearch as xf
from tests.interop.test_llama2c import random_model, write
from tests.tiny_runs import tiny_config, tiny_model
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.runtime import command, host_memory
from xfresearch.runtime.errors import MISTAKE, UserError, exit_code, out_of_memory
from xfresearch.runtime.host_memory import Limit
from xfresearch.sharding import capacity
from xfresearch.sharding.mesh import make_mesh
from xfresearch.training import fitting, loop

HANGS = """
import resource, sys
import xfresearch as xf
from xfresearch.training import fitting
resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
fitting.require_room = lambda *_: None  # so that the state is made
try:
    xf.train("gpt2:tiny", {"model.width": 65536, "model.depth": 48, "data.corpus": (sys.argv[1],)}, workdir=sys.argv[2])
except xf.UserError as error:
    print(error)
"""


def of_text(folder, name: str = "gpt2", **overrides):
    (folder / "a.txt").write_text("some text to read\n" * 200)
    given = {"data__corpus": f"('text_files:{folder}/*.txt',)", "steps": 2, "log__tracker": "jsonl"}
    return tiny_config(name, **given | overrides)


def has(monkeypatch, size: float) -> None:
    monkeypatch.setattr(host_memory, "limit", lambda: Limit(int(size), "this machine has"))


def state_and_gradients(config) -> tuple[int, int]:
    program = fitting.shared_program(config, make_mesh(config))
    sizes = jax.tree.map(lambda leaf: leaf.size * leaf.dtype.itemsize, program.shapes)
    return sum(jax.tree.leaves(sizes)), sum(jax.tree.leaves(sizes["params"]))


def test_a_state_that_does_not_fit_is_not_made(tmp_path, monkeypatch, capsys):
    config = of_text(tmp_path)
    state, gradients = state_and_gradients(config)
    monkeypatch.setattr(loop, "begin", lambda *_: pytest.fail("the state is made"))
    has(monkeypatch, state + gradients - 1)
    with pytest.raises(UserError) as caught:
        loop.train(config, tmp_path / "run", ByteTokenizer())
    words = r"this machine has ([\d.]+) kB: ([\d.]+) k parameters like these would fit; more devices"
    fits = re.search(words, str(caught.value))
    parameters = gradients / 4
    assert float(fits[1]) == pytest.approx((state + gradients) / 1e3, rel=0.01)
    assert float(fits[2]) == pytest.approx(parameters / 1e3, rel=0.01)
    assert "reading" not in capsys.readouterr().err  # no text was prepared
    has(monkeypatch, state + gradients)
    with pytest.raises(pytest.fail.Exception, match="the state is made"):
        loop.train(config, tmp_path / "run", ByteTokenizer())


def test_gradients_count_only_if_all_are_held_at_once(tmp_path, monkeypatch):
    config = of_text(tmp_path)
    state, gradients = state_and_gradients(config)
    has(monkeypatch, state + gradients - 1)
    for optimizer in (replace(config.optimizer, clip=0.0), replace(config.optimizer, clip_by="tensor")):
        fitting.fitting_program(replace(config, optimizer=optimizer), make_mesh(config))
    with pytest.raises(UserError, match="gradients .* kB"):
        fitting.fitting_program(config, make_mesh(config))


def test_an_update_that_does_not_fit_is_not_made(tmp_path, monkeypatch, capsys):
    """The compiler's count decides, whether it has compiled the program or read it from the cache."""
    config = of_text(tmp_path)
    mesh = make_mesh(config)
    sizes = fitting.shared_program(config, mesh).compiled_update.memory_analysis()
    needed = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    assert needed > sum(state_and_gradients(config))  # what is refused before is less than what an update needs
    has(monkeypatch, needed - 1)
    for _ in range(2):
        fitting.shared_program.__globals__["_program"].cache_clear()
        words = "an update needs .* temporary arrays.*training.remat=full.*batch_size=4"
        with pytest.raises(UserError, match=words) as caught:
            loop.train(config, tmp_path / "run", ByteTokenizer())
    assert exit_code(caught.value) == MISTAKE and "\n" not in str(caught.value)
    has(monkeypatch, needed)
    assert loop.train(config, tmp_path / "run", ByteTokenizer()).finished
    assert "warning: an update needs" in capsys.readouterr().err


def test_a_warning_begins_at_four_fifths(tmp_path, monkeypatch, capsys):
    config = of_text(tmp_path)
    needed = sum(state_and_gradients(config))
    for share, warned in ((0.79, False), (0.81, True)):
        has(monkeypatch, needed / share)
        fitting.fitting_program(config, make_mesh(config))
        found = re.findall("warning: the state of .* and this machine has .*: it may not fit\n", capsys.readouterr().err)
        assert len(found) == warned


def test_devices_of_a_cpu_share_its_memory(tmp_path, monkeypatch):
    config = of_text(tmp_path)
    mesh = make_mesh(config)
    state, gradients = state_and_gradients(config)
    has(monkeypatch, 2 * (state + gradients) - 1)
    fitting.fitting_program(config, mesh)
    monkeypatch.setattr(capacity, "_sharing", lambda devices: (jax.devices()[0], 2))
    with pytest.raises(UserError, match=f"needs {2 * (state + gradients) / 1e6:.3g} MB of memory"):
        fitting.fitting_program(config, mesh)


@jax.jit
def failing(*_):
    """An update whose allocation fails in a thread of XLA: copying the loss to the host would never end."""
    key = jax.random.key(0)
    product = jax.random.normal(key, (64, 64)) @ jax.random.normal(key, (64, 64))
    metrics = dict.fromkeys(("finite", "tokens", "loss"), jnp.int32(1))
    return {"params": jax.random.normal(key, (1 << 24, 1 << 24)), "product": product}, metrics


# In a process that then ends: with JAX 0.12, executions after one that failed so have its error, too.
FAILS = """
import sys
from pathlib import Path
import jax
from tests.training import test_fitting
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError
from xfresearch.training import loop
folder = Path(sys.argv[1])
loop.alone_at_first = lambda program: test_fitting.failing
try:
    loop.train(test_fitting.of_text(folder), folder / "run", ByteTokenizer())
except UserError as error:
    print(error, error.__cause__ is not None)
command._run(lambda _: jax.block_until_ready(test_fitting.failing()), [])
"""


def test_an_allocation_that_fails_in_a_thread_of_xla_is_one_line(tmp_path):
    done = subprocess.run([sys.executable, "-c", FAILS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    (told,) = done.stdout.splitlines()
    assert re.search(r"more memory than there is \(RESOURCE_EXHAUSTED.*\): config.training.remat=full.* True$", told)
    assert done.returncode == MISTAKE
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"error: this needs more memory than there is \(.*\): a smaller model.*", last)


def test_an_allocation_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "alone_at_first", lambda program: lambda *_: bytearray(1 << 62))
    with pytest.raises(UserError, match=r"more memory than there is \(.*\): config.training.remat=full") as caught:
        loop.train(of_text(tmp_path), tmp_path / "run", ByteTokenizer())
    assert caught.value.__cause__ is not None and "\n" not in str(caught.value)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command._run(lambda _: bytearray(1 << 62), [])
    assert ended.value.code == MISTAKE
    assert re.fullmatch(r"error: this needs more memory than there is \(.*\): a smaller model.*\n", capsys.readouterr().err)


def test_other_errors_are_bugs():
    quota = RuntimeError("RESOURCE_EXHAUSTED: quota of requests")
    assert not out_of_memory(quota) and not out_of_memory(ValueError("out of memory"))


def test_a_state_whose_allocation_fails_is_not_waited_for(tmp_path):
    """The real thing: XLA's own thread fails to allocate, and copying a number of the state to the host never ends."""
    (tmp_path / "a.txt").write_text("some text to read\n" * 200)
    arguments = [sys.executable, "-c", HANGS, f"text_files:{tmp_path}/*.txt", str(tmp_path / "run")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert "the run needs more memory than there is (RESOURCE_EXHAUSTED: " in done.stdout, done.stderr
    assert "more devices" in done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model as a run, as a Hugging Face folder, and as a llama2.c file."""
    folder = tmp_path_factory.mktemp("models")
    lm = tiny_model("llama")
    lm.save(folder / "run")
    lm.export_hf(folder / "folder")
    write(folder / "model.bin", *random_model(tied=True), version=0)
    return folder


@pytest.mark.parametrize("name", ["run", "run/checkpoints/0", "folder", "model.bin"])
def test_a_model_that_does_not_fit_is_not_read(models, monkeypatch, name):
    lm = xf.load(models / name)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    has(monkeypatch, size)
    xf.load(models / name)
    has(monkeypatch, size - 1)
    with pytest.raises(UserError, match=r"needs .* of memory \(.* parameters .*B\), and this machine has .* would fit"):
        xf.load(models / name)
