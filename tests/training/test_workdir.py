"""Config keys that may differ when a run resumes in its directory, keys that may not, and refused directories."""

import errno
import fcntl
import shutil
import time

import jax
import pytest
from etils import epath

from tests.data import made_tokenizers as made
from tests.tiny_runs import ROOT, tiny_config, tiny_model
from xfresearch.checkpoints import store
from xfresearch.checkpoints.validity import PUBLISHED
from xfresearch.data.tokenizers import ByteTokenizer, load_tokenizer
from xfresearch.options.run_options import CheckpointConfig
from xfresearch.run_config.config_files import read_json
from xfresearch.runtime import files
from xfresearch.runtime.errors import TRANSIENT, Stopped, UserError, exit_code
from xfresearch.train import main as train_main
from xfresearch.training import loop, session
from xfresearch.training import workdir as workdirs
from xfresearch.training.fork import say_changes
from xfresearch.training.metrics import MetricsLog
from xfresearch.training.workdir import (
    lineage,
    locked,
    record,
    saved_config,
    starts,
    unproductive_time,
    write_config,
    write_lineage,
)


@pytest.fixture
def workdir(tmp_path):
    return epath.Path(tmp_path)


@pytest.mark.parametrize(
    "overrides",
    [
        {"training__attention_kernel": "plain"},
        {"training__remat": "full", "mesh__fsdp": 2, "mesh__between": "fsdp"},
        {"data__workers": 3, "log__every": 7},
    ],
)
def test_execution_keys_may_differ_on_resume(workdir, overrides):
    write_config(workdir, tiny_config(), ByteTokenizer())
    record(workdir, tiny_config(), fork=False)
    record(workdir, tiny_config(**overrides), fork=False)
    assert len(starts(workdir)) == 2


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"optimizer__learning_rate": 0.5}, "config.optimizer.learning_rate: 0.01 -> 0.5"),
        ({"model__blocks__main__attention__window": 9}, "config.model.blocks.main.attention.window: 0 -> 9"),
        ({"model__dtype": "bfloat16"}, "config.model.dtype: 'float32' -> 'bfloat16'"),
    ],
)
def test_keys_that_change_the_result_need_a_fork(workdir, overrides, words, capsys):
    write_config(workdir, tiny_config(), ByteTokenizer())
    record(workdir, tiny_config(), fork=False)
    with pytest.raises(UserError, match=rf"{words}\): use a new directory$"):  # there is nothing to resume from
        record(workdir, tiny_config(**overrides), fork=False)
    has_checkpoint(workdir, 20)
    with pytest.raises(UserError, match=rf"{words}\): use a new directory, or --fork"):
        record(workdir, tiny_config(**overrides), fork=False)
    trained = {"path": "runs/a", "kind": "run", "step": 10, "digest": "0123"}
    write_lineage(workdir, [trained])
    record(workdir, tiny_config(**overrides), fork=True)
    assert len(starts(workdir)) == 2 and lineage(workdir) == [trained]
    say_changes(saved_config(workdir), tiny_config(**overrides), 20)
    rates = "; the learning rate of the next update is 0.205 instead of 0.00411" if "learning_rate" in words else ""
    assert capsys.readouterr().err == f"--fork: resumes from step 20 with {words}{rates}\n"


def has_checkpoint(workdir, step: int) -> None:
    """Makes the directories of a published checkpoint, which has no content."""
    (workdir / "checkpoints" / str(step) / "rest").mkdir(parents=True)
    (workdir / "checkpoints" / str(step) / PUBLISHED).write_text("")


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"model__width": 64}, r"another model \(params/.*: float32\[2, 4, 8\] -> float32\[2, 4, 16\]\): use a new"),
        ({"optimizer__kind": "lion"}, r"another optimizer \(opt/.*/nu/.* -> \(absent\)\): use .* --start="),
        ({"steps": 10}, "config.steps=10 is not allowed: it must be at least 20, the step of the newest checkpoint"),
        ({"training__ema": 0.9}, r"another parameter average \(ema/.*: \(absent\) -> .*\): use a new directory"),
        ({"start__path": "runs/b"}, r"config.start.path='runs/b' is not allowed with --fork, .* it must be ''"),
        ({"model__param_dtype": "float64"}, "config.model.param_dtype='float64' is not allowed: it must be 'float32' with"),
    ],
)
def test_a_fork_needs_a_state_that_fits(workdir, overrides, words):
    write_config(workdir, tiny_config(), ByteTokenizer())
    has_checkpoint(workdir, 20)
    with pytest.raises(UserError, match=words):
        record(workdir, tiny_config(**overrides), fork=True)
    assert starts(workdir) == []


@pytest.mark.parametrize("steps, saved_at, lost, down", [(30, 1020.0, 10.0, 3970.0), (2, 1031.0, 0.0, 0.0)])
def test_a_copy_of_a_run_has_lost_no_more_than_the_run(workdir, monkeypatch, steps, saved_at, lost, down):
    """A run that started at 1000, saved step 2 and wrote its last row at 1030 is copied, and the copy started at 5000."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    config = tiny_config(steps=steps, optimizer__warmup=1)
    write_config(workdir / "run", config, ByteTokenizer())
    record(workdir / "run", config, fork=False)
    log = MetricsLog(workdir / "run", 0)
    for step, now[0] in ((1, 1010.0), (2, 1030.0)):
        log.write(step, "train", {"loss": 1.0})
    log.close()
    has_checkpoint(workdir / "run", 2)
    shutil.copytree(workdir / "run", workdir / "copy")
    now[0] = 5000.0
    record(workdir / "copy", config, fork=False)
    assert unproductive_time(starts(workdir / "copy"), saved_at) == {"lost": lost, "down": down}


@pytest.mark.parametrize("saved", [False, True])
def test_a_fork_needs_a_checkpoint(workdir, saved):
    """A new directory, or that of a run that was killed before its first checkpoint."""
    if saved:
        write_config(workdir, tiny_config(), ByteTokenizer())
    with pytest.raises(UserError, match=f"--fork is not allowed with --workdir={workdir}, .* use --start RUN"):
        record(workdir, tiny_config(), fork=True)
    assert starts(workdir) == []


def test_a_model_without_optimizer_state_cannot_be_resumed(workdir):
    tiny_model().save(workdir / "saved")
    for fork in (False, True):
        with pytest.raises(UserError, match=f"model without optimizer state, .*--start={workdir}/saved to start from its"):
            record(workdir / "saved", tiny_config(), fork)


DAMAGE = [b"", b"\0" * 64, b"\xff{", b"[]", b"[" * 100_000]


@pytest.mark.parametrize(
    "name, content",
    [*(("config.json", each) for each in DAMAGE), *(("run.json", each) for each in [*DAMAGE, b'{"starts": 3}'])],
    ids=lambda value: repr(value[:8]),
)
def test_a_damaged_side_file_is_set_aside_and_written_again(workdir, name, content):
    write_config(workdir, tiny_config(), ByteTokenizer())
    record(workdir, tiny_config(), fork=False)
    (workdir / name).write_bytes(content)
    record(workdir, tiny_config(), fork=False)
    write_config(workdir, tiny_config(), ByteTokenizer())
    assert (workdir / "damaged" / f"{name}-0").read_bytes() == content
    assert read_json(workdir / "config.json") == tiny_config() and len(starts(workdir)) == 1


@pytest.mark.parametrize("content", [*DAMAGE, b'{"lineage": 3}', b'{"lineage": [3]}', b'{"lineage": [{"path": "a"}]}'])
def test_a_damaged_lineage_is_left_out(workdir, content):
    (workdir / "run.json").write_bytes(content)
    assert lineage(workdir) == []


def test_a_config_of_another_version_is_refused(workdir):
    (workdir / "config.json").write_text('{"widht": 3}')
    with pytest.raises(UserError, match="widht"):
        record(workdir, tiny_config(), fork=False)


def test_metrics_without_checkpoints_are_not_discarded(workdir):
    """A run that was killed before its first checkpoint has an empty checkpoints/ and starts again."""
    write_config(workdir, tiny_config(), ByteTokenizer())
    row = '{"step": 4, "kind": "train", "loss": 1.0}\n'
    (workdir / "metrics.jsonl").write_text(row)
    for fork in (False, True):
        with pytest.raises(UserError, match=f"--workdir={workdir} has metrics of a run, but its checkpoints/ is missing"):
            record(workdir, tiny_config(), fork)
    assert (workdir / "metrics.jsonl").read_text() == row and not (workdir / "run.json").exists()
    (workdir / "checkpoints").mkdir()
    record(workdir, tiny_config(), fork=False)


def test_a_new_tokenizer_replaces_the_old_one(workdir):
    made.write(workdir / "other", {"tokenizer.json": made.byte_level()})
    other = load_tokenizer(workdir / "other")
    for tokenizer in (ByteTokenizer(), other):
        write_config(workdir, tiny_config(), tokenizer)
    assert load_tokenizer(workdir / "tokenizer").vocab_size == other.vocab_size != ByteTokenizer().vocab_size


def test_a_fork_to_a_data_set_with_labels_removes_the_tokenizer(workdir):
    for tokenizer in (ByteTokenizer(), None, None):
        write_config(workdir, tiny_config(), tokenizer)
        assert (workdir / "tokenizer").exists() == (tokenizer is not None)


def flags(workdir, cache, *overrides: str) -> list[str]:
    corpus = f"--config.data.corpus=('text_files:{ROOT}/xfresearch/models/*.py',)"
    config = f"--config={ROOT}/configs/gpt2.py:tiny"
    return [config, f"--workdir={workdir}", corpus, f"--config.data.cache_dir={cache}", *overrides]


def test_a_second_process_in_the_same_directory_is_refused(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(UserError, match="run: another process is training in it"):
        train_main(flags(tmp_path / "run", tmp_path))


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "run"):
        pass
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}/run cannot be locked: Function not implemented; start only one run in it\n"
    )


def test_a_full_disk_at_the_start_is_one_line_that_allows_a_retry(tmp_path, monkeypatch):
    def open_lock(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(workdirs, "open_lock", open_lock)
    with pytest.raises(UserError, match="cannot be written: No space left on device") as raised:
        locked(tmp_path / "run").__enter__()
    assert exit_code(raised.value) == TRANSIENT


def test_a_lineage_that_the_disk_cannot_read_is_not_dropped(tmp_path, monkeypatch):
    records = [{"path": "a", "kind": "run", "step": 3, "digest": "d"}]
    path = epath.Path(tmp_path)
    write_lineage(path, records)
    assert lineage(path) == records
    monkeypatch.setattr(files, "open_to_read", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    with pytest.raises(UserError, match="I/O error"):
        lineage(path)


def test_the_lineage_is_that_of_the_newest_beginning(workdir):
    """Also of a run whose only checkpoints are in the memory of its machines."""
    trained = {"path": "runs/a", "kind": "run", "step": 10, "digest": "0123"}
    record(workdir, tiny_config(), fork=False)
    write_config(workdir, tiny_config(), ByteTokenizer())
    write_lineage(workdir, [trained])
    record(workdir, tiny_config(), fork=False)
    assert lineage(workdir) == [trained] and len(starts(workdir)) == 2
    write_lineage(workdir, [])
    assert lineage(workdir) == [] and len(starts(workdir)) == 2


@pytest.mark.parametrize("taken", ["run", "run/.lock"])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path, taken):
    """A file at the path of the directory, or a directory at the path of its lock."""
    (tmp_path / "run").write_text("") if taken == "run" else (tmp_path / taken).mkdir(parents=True)
    with pytest.raises(UserError, match=f"--workdir={tmp_path}/run: cannot be written: "), locked(tmp_path / "run"):
        pass


def test_a_mistake_leaves_the_directory_free_for_the_right_config(tmp_path):
    with pytest.raises(UserError, match="config.mesh={.*"):
        train_main(flags(tmp_path / "run", tmp_path, "--config.mesh.data=99"))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_fork_that_is_not_possible_leaves_the_run_as_it_was(tmp_path):
    run = tmp_path / "run"
    write_config(epath.Path(run), tiny_config(), ByteTokenizer())
    checkpoints = store.Checkpoints(run, CheckpointConfig())
    checkpoints.save(10, {"params": {"embed": {"table": jax.numpy.zeros((257, 32))}}, "step": jax.numpy.int32(10)}, {})
    checkpoints.close()
    other = ["--config.model.width=64", "--config.data.tokenizer=bpe", "--config.data.bpe_vocab=300"]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"another model \(params/.*\): use a new directory"):
        train_main(flags(run, tmp_path, "--fork", *other))
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path.name for path in after.keys() - before.keys()} == {".lock"}
    assert {path: after[path] for path in before} == before


def test_the_account_of_time_begins_with_the_process(tmp_path, monkeypatch):
    """All time since `began` is counted: the imports, the tokenizer, the data."""

    def stop(config, path, tokenizer, clock, *_, **__):
        raise Stopped(clock.state())

    def slow_tokenizer(*_):
        time.sleep(0.5)
        return ByteTokenizer()

    monkeypatch.setattr(session, "_tokenizer", slow_tokenizer)
    monkeypatch.setattr(loop, "train", stop)
    began = time.time() - 50
    with pytest.raises(Stopped) as stopped:
        session.run(tiny_config(), str(tmp_path), [], fork=False, began=began)
    seconds = stopped.value.args[0]
    assert seconds["data"] >= 0.5 and 50 <= seconds["start"] + seconds["data"] <= time.time() - began + 0.01
    assert starts(epath.Path(tmp_path))[-1]["seconds"] == began
