"""One thread owns the devices, and the first execution of each program of a run is alone there."""

import json
import re
import threading
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.device_calls import Call, recorded
from tests.studies.tiny import FILE, time_nothing
from tests.tiny_runs import tiny_config
from xfresearch import edit, evaluate, generate
from xfresearch.analysis.panel import Panel
from xfresearch.checkpoints import store
from xfresearch.data.pipeline import Prefetch
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.sharding.first_execution import alone_at_first
from xfresearch.study import main as study_main
from xfresearch.training import loop
from xfresearch.training.callbacks import Callback

ROOT = Path(__file__).parents[2] / "xfresearch"
STARTS_THREADS = re.compile(r"threading\.(Thread|Timer)\(|PoolExecutor\(|to_thread\(|run_in_executor\(")
# Files that start threads, or wait for a function in one. None of these functions computes with JAX.
WITH_THREADS = {
    "benchmarks/gpu_rows.py": "a signal after some updates",
    "checkpoints/writing.py": "Orbax's, which write: they sync files",
    "data/crew.py": "talking to processes that make shards",
    "data/making.py": "tokenisation",
    "data/pairs/pair_splits.py": "tokenisation",
    "data/pipeline.py": "reading batches",
    "data/shard_writers.py": "renewing a small file",
    "runtime/distributed.py": "a watchdog",
    "runtime/progress.py": "a line on standard error",
    "training/claims.py": "renewing a claim on a directory",
}
PROGRAMS = ("jit(update)", "jit(evaluator)", "jit(_measure)")
STEPS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number}.txt").write_text("some text to read\n" * 20)
    given = {"data__corpus": f"('text_files:{folder}/*.txt',)", "sequence_length": 64, "batch_size": 2, "steps": STEPS}
    given |= {"checkpoint__every": 4, "checkpoint__keep": 9, "log__tracker": "jsonl", "log__panel": 4, "data__prefetch": 2}
    return tiny_config("gpt2", **given, evaluation__every=4, evaluation__sequences=4)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """(directory, calls) of a run whose batches are always read in time. The calls of `Trainer.report` are among them."""
    workdir = tmp_path_factory.mktemp("runs") / "run"
    with recorded() as calls, pytest.MonkeyPatch.context() as patch:
        report = loop.Trainer.report

        def reported(self, step, *arguments):
            calls.append(Call("report", str(step), ""))
            report(self, step, *arguments)
            calls.append(Call("reported", str(step), ""))

        patch.setattr(loop.Trainer, "report", reported)
        patch.setattr(Prefetch, "ready", lambda self: self._waiting and self._waiting[0][1].exception() is None)
        loop.train(config, workdir, ByteTokenizer(), panel=Panel)
    return workdir, calls


def threads(calls) -> set[str]:
    return {call.thread for call in calls if call.thread}


def test_the_calls_of_another_thread_are_seen():
    def use():
        np.asarray(jax.jit(lambda x: x + 1)(jax.device_put(np.ones(3))))

    for start in ({"target": use, "name": "other"}, {"target": lambda: jnp.ones(3) + 1, "name": "other"}):
        with recorded() as calls:
            thread = threading.Thread(**start)
            thread.start()
            thread.join()
        assert threads(calls) == {"other"} and "run" in {call.kind for call in calls}


def test_training_and_saving_use_the_devices_in_one_thread(trained):
    """The prefetching thread has NumPy arrays, and so have those in which Orbax writes."""
    workdir, calls = trained
    assert threads(calls) == {threading.current_thread().name} and store.steps(workdir) == [4, 8]
    assert {"put", "run", "read", "copy", "wait"} <= {call.kind for call in calls}


def without_waits_of_reads(calls: list[Call]) -> list[Call]:
    """The calls without a wait directly before a read: it raises the error of an allocation that has failed, and waits for
    no more than the read does (sharding/capacity.py)."""
    after = [*calls[1:], Call("", "", "")]
    return [call for call, following in zip(calls, after, strict=True) if (call.kind, following.kind) != ("wait", "read")]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_alone_at_its_first_execution(trained, program):
    calls = without_waits_of_reads([call for call in trained[1] if call.kind not in ("report", "reported", "copy")])
    names = [call.name for call in calls]
    first = names.index(program)
    assert [call.kind for call in calls[first - 1 : first + 2]] == ["wait", "run", "wait"]
    second = names.index(program, first + 1)
    assert calls[second - 1].kind != "wait" and calls[second + 1].kind != "wait"


def test_the_first_execution_waits_for_all_arrays_and_for_its_results(monkeypatch):
    placed, waited, wait = jnp.arange(3.0), [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: waited.append(jax.tree.leaves(tree)) or wait(tree))
    program = alone_at_first(jax.jit(lambda x: x + 1, donate_argnums=0))
    first = program(jnp.ones(3))
    assert any(x is placed for x in waited[0]) and waited[1][0] is first and len(waited) == 2
    program(program(first))
    assert len(waited) == 2


@pytest.mark.parametrize("step, placed", [(2, False), (3, True), (6, False), (7, True)])  # no evaluation, no checkpoint
def test_two_batches_are_placed_and_then_the_metrics_before_are_read_while_an_update_runs(trained, step, placed):
    calls = without_waits_of_reads([call for call in trained[1] if call.kind != "copy"])
    updates = [number for number, call in enumerate(calls) if call.name == "jit(update)"]
    kinds = [call.kind for call in calls[updates[step - 1] + 1 : updates[step]]]
    begun = kinds.index("report")
    assert set(kinds[:begun]) == ({"put"} if placed else set())
    assert kinds[-1] == "reported" and set(kinds[begun + 1 : -1]) == {"read"}
    reports = [call.name for call in calls[: updates[step]] if call.kind == "reported"]
    assert reports[-1] == str(step - 1)


class Guarded(Callback):
    """Forbids implicit transfers once the first update is reported."""

    def __init__(self, stack: ExitStack):
        self.stack = stack

    def on_step(self, step: int, figures) -> None:
        if step == 1:
            self.stack.enter_context(jax.transfer_guard("disallow"))


def test_the_loop_has_no_implicit_transfer(config, tmp_path):
    """On a CPU the guard sees NumPy arrays and numbers that programs get, and no copies to the host."""
    with ExitStack() as stack:
        loop.train(config, tmp_path, ByteTokenizer(), panel=Panel, callbacks=[Guarded(stack)])
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.ones(3) + np.ones(3)


def commands(workdir, folder):
    """{command: (function, arguments)} that use the trained run."""
    request = {"subject": "Ada", "prompt": "plays {}", "target": "a", "target_new": "b"}
    (folder / "requests.json").write_text(json.dumps([request]))
    (folder / "tiny.py").write_text(FILE)
    read = ("--workdir", str(workdir))
    requests = ("--request", str(folder / "requests.json"), "--memory", "blocks.1.feed_forward")
    return {
        "evaluate": (evaluate.main, [*read, "--all-steps", "--limit", "4"]),
        "generate": (generate.main, [*read, "--prompt", "some", "--max-new-tokens", "4"]),
        "edit": (edit.main, ["finetune", *read, "--to", str(folder / "edited"), *requests, "--steps", "2"]),
        "study": (study_main, ["--config", str(folder / "tiny.py"), "--workdir", str(folder / "study"), "--job=4"]),
    }


@pytest.mark.parametrize("name", ["evaluate", "generate", "edit", "study"])
def test_a_command_uses_the_devices_in_one_thread(name, trained, tmp_path, monkeypatch):
    time_nothing(monkeypatch)
    command, arguments = commands(trained[0], tmp_path)[name]
    jax.clear_caches()  # only programs that are compiled here are seen
    with recorded() as calls:
        command(arguments)
    assert threads(calls) == {threading.current_thread().name}
    assert {"put", "run", "read"} <= {call.kind for call in calls}


def test_threads_are_started_where_no_device_is_used():
    files = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}
    assert {name for name, text in files.items() if STARTS_THREADS.search(text)} == set(WITH_THREADS)
