"""Emergency checkpoints: where they are refused, who sends which shards, and runs that lose machines.

Processes on this machine stand for machines, and a directory for each process for its memory.
"""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath

from tests.training.emergency_worker import placed, same, values
from tests.training.processes import Processes, curve, digests, flags
from xfresearch.checkpoints import emergency, store
from xfresearch.options.run_options import CheckpointConfig
from xfresearch.runtime import crash_log, distributed
from xfresearch.runtime.errors import UserError
from xfresearch.sharding import replicas

LAST = 14
EVERY = 4  # updates between checkpoints in the run's directory


def machines(processes, *, slices=None, **sizes) -> SimpleNamespace:
    """A mesh of devices that belong to `processes`, and to `slices` if there are several."""
    of = slices or [0] * len(processes)
    devices = [SimpleNamespace(process_index=p, slice_index=s) for p, s in zip(processes, of, strict=True)]
    array = np.array(devices, object).reshape(tuple(sizes.values()))
    return SimpleNamespace(devices=array, axis_names=tuple(sizes), shape=sizes)


@pytest.mark.parametrize(
    "mesh, possible",
    [
        (machines([0, 1], data=2), True),
        (machines([0, 1], context=2), True),
        (machines([0, 1], fsdp=2), False),
        (machines([0, 0], data=2), False),  # one host
        (machines([0, 0, 1, 1], data=2, fsdp=2), True),
        (machines([0, 1, 0, 1], data=2, fsdp=2), False),  # both replicas of a shard are on one host
        (machines([0, 1, 2, 3], slices=[0, 0, 1, 1], data=2, fsdp=2), True),
        (machines([0, 1, 2, 3], slices=[0, 1, 0, 1], data=2, fsdp=2), False),  # on one slice
    ],
)
def test_a_mesh_needs_replicas_that_do_not_fail_together(mesh, possible):
    assert replicas.is_replicated(mesh, machines=[0, 1, 2, 3]) == possible


def test_processes_on_one_machine_are_lost_together():
    mesh = machines([0, 1, 2, 3], data=2, fsdp=2)
    assert replicas.is_replicated(mesh, machines=[0, 0, 1, 1])
    assert not replicas.is_replicated(mesh, machines=[0, 1, 0, 1])


def test_each_shard_comes_from_the_first_replica_that_has_it():
    mesh = machines([0, 1, 2, 3, 4, 5, 6, 7], fsdp=2, data=2, context=2)  # shard 0 is on 0 to 3, shard 1 on 4 to 7
    chosen = replicas.sources(mesh, {2, 3, 5, 7})
    assert chosen.shape == mesh.devices.shape
    assert [device.process_index for device in mesh.devices[chosen]] == [2, 5]
    assert replicas.sources(mesh, {0, 1, 2, 3}) is None
    assert [replicas.shards_of(mesh, process) for process in (3, 4, 9)] == [{0}, {1}, set()]


def refused(mesh, path: str) -> str:
    with pytest.raises(UserError) as error:
        emergency.of_run("/run", CheckpointConfig(emergency=path), mesh, 0.0)
    assert str(error.value).startswith(f"config.checkpoint.emergency={path!r} is not allowed: ")
    return str(error.value)


def test_they_are_refused_where_they_cannot_help(monkeypatch):
    assert "an absolute path" in refused(machines([0, 1], data=2), "memory")
    assert "an absolute path" in refused(machines([0, 1], data=2), "gs://bucket/memory")
    assert "'' with 1 process(es)" in refused(machines([0, 0], data=2), "/dev/shm/x")
    monkeypatch.setattr(distributed, "is_active", lambda: True)
    monkeypatch.setattr(distributed, "gathered", lambda own: [own, own])  # two processes
    assert "mesh {'fsdp': 2}: no other machine" in refused(machines([0, 1], fsdp=2), "/dev/shm/x")


def in_memory(memory, begun: float = 1.0) -> emergency.Emergency:
    """The emergency checkpoints in one process of a run that began at a time."""
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return emergency.Emergency("/run", CheckpointConfig(emergency=str(memory), emergency_every=2), mesh, begun)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A memory after emergency checkpoints of steps 2, 4 and 6."""
    memory = tmp_path_factory.mktemp("saved") / "memory"
    made = in_memory(memory)
    made.folder.mkdir(parents=True)
    for step in (2, 4, 6):
        assert made.save(step, placed(made.mesh, values(step)), {"clock": {}}) == ""
    made.wait()
    return memory


@pytest.fixture
def memory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "memory")


def test_the_two_newest_are_kept_and_read_bit_for_bit(memory):
    made = in_memory(memory)
    assert [made.due(1), made.due(1, stop=True), made.due(2)] == [False, True, True] and made.steps() == [4, 6]
    state, meta = made.restore(6, placed(made.mesh, values(0)))
    assert meta["step"] == 6 and same(made.mesh, state, 6)
    other = in_memory(memory, begun=2.0)
    assert other.folder == made.folder and not other.steps()
    made.begin(4)
    assert made.steps() == [4] and [path.name for path in made.folder.iterdir()] == ["4"]
    bad = placed(made.mesh, values(8))
    bad["params"]["w"] = bad["params"]["w"].at[0, 0].set(np.nan)
    assert made.save(8, bad, {}) == "params/w has values that are not finite" and made.steps() == [4]
    made.clear()
    assert not list(memory.iterdir())


def test_what_was_changed_is_damage_and_what_cannot_be_written_a_warning(memory, capsys):
    made = in_memory(memory)
    target = placed(made.mesh, values(0))
    path = made.folder / "6" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["digests"]["params/w"] = f"float32[8, 4] {0:032x}"
    path.write_text(json.dumps(store.with_digest({key: value for key, value in meta.items() if key != "digest"})))
    assert made.steps() == [4, 6]
    with pytest.raises(store.Corrupt, match="the emergency checkpoint: params/w does not have the digest"):
        made.restore(6, target)
    shutil.rmtree(made.folder / "4" / "rest")
    with pytest.raises(store.Corrupt, match="checkpoint 4 is damaged: the emergency checkpoint: .*rest is missing"):
        made.restore(4, target)
    shutil.rmtree(made.folder)
    made.folder.write_text("in the way")
    assert made.save(8, target, {}) == ""
    made.wait()
    assert "warning: the emergency checkpoint of step 8 is not written: " in capsys.readouterr().err


def test_a_machine_that_becomes_another_process_keeps_its_shards(memory):
    """It was process 1, which had the other replica of its shards. A directory of other shards is removed."""
    made = in_memory(memory)
    made.folder.rename(made.root / "process-1")
    for other in ("process-2", "process-3"):
        (made.root / other).mkdir()
    mesh, made.mesh = made.mesh, machines([0, 2, 1, 3], data=2, fsdp=2)
    made.adopt({0, 3})
    made.mesh = mesh
    assert made.steps() == [4, 6] and sorted(path.name for path in made.root.iterdir()) == ["process-0", "process-3"]


def test_the_line_about_a_lost_process_names_the_emergency_checkpoint(tmp_path):
    for path in ("run/checkpoints/4", "memory/7"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "commit_success.txt").touch()
    hint = crash_log.resume_hint(str(tmp_path / "run"), str(tmp_path / "memory"))
    assert "from the emergency checkpoint of step 7," in hint and "is step 4)" in hint
    (tmp_path / "memory" / "7").rename(tmp_path / "memory" / "3")
    assert crash_log.resume_hint(str(tmp_path / "run"), str(tmp_path / "memory")).endswith("resumes from step 4")


@pytest.mark.long
def test_shards_that_are_left_in_different_replicas_are_put_together(tmp_path):
    """Four machines, of which 0 and 1 have the first replica, and 2 and 3 the second."""
    with Processes(4, "tests.training.emergency_worker", f"--memory={tmp_path}") as processes:
        ended = processes.succeed()
    heard = [json.loads(err[err.index("RESULT ") :].split(" ", 1)[1].splitlines()[0]) for _, _, err in ended]
    damage = heard[0]["2 is damaged"].pop()
    assert damage.startswith("checkpoint 6 is damaged: the emergency checkpoint: ")
    assert damage.endswith("(in process 2)")
    expected = {name: [[4, 6], [0, 1], True] for name in ("all", "slices change places")}
    unwritable = "config.checkpoint.emergency='/proc/x' is not allowed: it must be a directory that can be written ("
    for each in heard:
        assert each.pop("refused").startswith(unwritable)
    expected |= {"another run": [[]], "left": [], "without 0 and 3": [[4, 6], [1, 2], True]}
    expected |= {"2 is damaged": [[4, 6], [1, 2]], "without 0, 2 and 3": [[]]}
    for each in heard[1:]:
        assert each["2 is damaged"].pop() == damage
    assert heard == [expected] * 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def train(workdir, cache, memory, *overrides: str) -> Processes:
    """Two processes, each with a replica, that make an emergency checkpoint after each update."""
    given = [f"--config.checkpoint.emergency={memory}", "--config.checkpoint.emergency_every=1", *overrides]
    given = [*(given if memory else []), "--config.evaluation.every=5"]
    return Processes(2, "xfresearch.train", f"--workdir={workdir}", *flags(cache, *given, steps=LAST))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """A run that nothing interrupts, without emergency checkpoints."""
    workdir = tmp_path_factory.mktemp("whole")
    train(workdir, cache, "").succeed()
    return workdir


def kept(memory, process: int) -> list[int]:
    """The steps that a process has in its memory."""
    names = [path.parent.name for path in memory.glob(f"*/process-{process}/*/commit_success.txt")]
    return sorted(int(name) for name in names if name.isdecimal())  # the name that it is written under is another one


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_that_loses_a_machine_goes_on_from_the_memory_of_the_other(whole, cache, tmp_path, lost):
    """A process is killed, and with its machine its memory is gone. The run ends bit for bit like one without a fault."""
    memory, workdir, left = tmp_path / "memory", tmp_path / "run", 1 - lost
    with train(workdir, cache, memory) as processes:
        processes.until(lambda: max(kept(memory, left), default=0) > EVERY and kept(memory, left)[-1] % EVERY)
        processes[lost].kill()
        ended = processes.finish()
    shutil.rmtree(next(memory.glob(f"*/process-{lost}")))
    step, saved = kept(memory, left)[-1], store.steps(workdir)[-1]
    assert step > saved
    hint = f"process {lost} of 2 is lost; the same command resumes from the emergency checkpoint of step {step}, or "
    assert hint in ended[left][2].splitlines()[-1] and f"is step {saved})" in ended[left][2].splitlines()[-1]
    ended = train(workdir, cache, memory).succeed()
    words = f"resumes from step {step}, an emergency checkpoint of process {left}"
    assert f"[process 0] {words}\n" in ended[0][2]
    assert words.removeprefix("resumes from ") in (workdir / "report.html").read_text()
    assert curve(workdir) == curve(whole) and digests(workdir, LAST) == digests(whole, LAST)
    assert not list(memory.iterdir())  # a run that has ended needs no memory


@pytest.mark.long
def test_a_run_that_loses_all_memory_goes_on_from_its_directory(whole, cache, tmp_path):
    memory, workdir = tmp_path / "memory", tmp_path / "run"
    with train(workdir, cache, memory) as processes:
        processes.until(lambda: max(kept(memory, 0), default=0) > EVERY)
        processes[1].kill()
        processes.finish()
    shutil.rmtree(memory)
    step = store.steps(workdir)[-1]
    ended = train(workdir, cache, memory).succeed()
    assert f"[process 0] resumes from step {step}, a checkpoint in {workdir}\n" in ended[0][2]
    assert curve(workdir) == curve(whole) and digests(workdir, LAST) == digests(whole, LAST)


def test_two_runs_of_one_name_do_not_share_their_memory(tmp_path):
    config, mesh = CheckpointConfig(emergency="/m"), machines([0], data=1)
    first, second = (emergency.Emergency(tmp_path / name, config, mesh, 0.0).root for name in ("a/x", "b/x"))
    assert first != second and first.parent == second.parent == epath.Path("/m")
