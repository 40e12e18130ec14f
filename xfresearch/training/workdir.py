"""The working directory of a run: its lock, and the files that describe the run.

config.json   the resolved config           run.json     versions, commit, machine and command line of every start;
                                                         the lineage: the trained models that the run started from
tokenizer/    the tokenizer's files         metrics.jsonl, checkpoints/, report.html, and what the tracker writes
errors/       with several processes, the last lines of each one that failed
huggingface.json, huggingface/   what an export needs of the Hugging Face folder that the run came from, if any
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import NamedTuple

from etils import epath

from xfresearch.checkpoints import store
from xfresearch.data.given import remember
from xfresearch.data.tokenizers import is_tokenizer_file
from xfresearch.interop import source
from xfresearch.options.comparing import RESULT, differences
from xfresearch.options.reading import from_dict, to_json
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import read_json
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import UserError, disk_errors
from xfresearch.runtime.files import (
    exists,
    in_bucket,
    inside,
    make_directory,
    move_damaged,
    open_lock,
    read_object,
    remove_files,
    write_json,
)
from xfresearch.runtime.schema import Maybe, Of, check, is_number
from xfresearch.training.claims import Busy, claimed
from xfresearch.training.fork import check_fork
from xfresearch.training.metrics import Clock, last_written

START = {"seconds": Of(lambda value: is_number(value) and value >= 0, "a time of at least 0"), "gap": float}
START |= {"finished_before": bool, "machine": dict, "versions": dict, "commit": str, "resumed": Maybe(str)}
LINEAGE = {"path": str, "kind": str, "step": Maybe(int), "digest": str}
RUN = {"starts": [START], "lineage": Maybe([LINEAGE])}  # run.json


class Origin(NamedTuple):
    """What a run begins from."""

    lineage: list[dict]  # the trained models, the nearest first
    source: source.Source | None  # of the Hugging Face folder that the nearest one came from


NEW = Origin([], None)  # new parameters


@contextmanager
def locked(workdir):
    """Creates the directory and locks it for this process; one in a bucket is claimed (claims.py). Raises UserError if it
    cannot be written, Busy if another process trains in it."""
    path = epath.Path(workdir).expanduser()
    try:
        make_directory(path)
        lock = None if in_bucket(workdir) else open_lock(inside(path, ".lock"))
    except OSError as error:
        raise UserError(f"--workdir={workdir}: cannot be written: {error.strerror or error}") from error
    if lock is None:
        with claimed(path):
            yield path
        return
    try:
        _lock(lock, path)
        yield path
    finally:
        os.close(lock)


def _lock(lock: int, path) -> None:
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Busy(f"--workdir={path}: another process is training in it") from error
    except OSError as error:  # no locks on this file system, as on some Lustre mounts
        print(f"warning: {path} cannot be locked: {error.strerror}; start only one run in it", file=sys.stderr)


def require_same_config(config: Config) -> None:
    """Raises UserError in every process if any of them has another config than process 0. Such processes would wait for
    each other forever, or compute something else."""
    if distributed.is_active():
        first = from_dict(Config, distributed.shared(dataclasses.asdict(config)))
        lines = differences(first, config, deciding=(*RESULT, "execution"))
        difference = distributed.first_message("; ".join(lines))
        if difference:
            raise UserError(f"every process needs the config of process 0: {difference}")


def record(
    path: epath.Path, config: Config, fork: bool, began: float | None = None, command: Sequence[str] = ()
) -> None:
    """Adds this start with its `command`, at the time `began` (default: now), to run.json, with the gap before it, which the
    goodput needs.

    Raises UserError, with the differences, if the directory holds a run of another config and `fork` is False; also if
    it holds a model without optimizer state, the metrics of a run whose checkpoints are gone, or, with `fork`, nothing
    that can resume with this config.
    """
    if store.has_only_params(path):
        raise UserError(
            f"--workdir={path} holds an imported or saved model without optimizer state, so training cannot resume "
            f"from it: use a new directory, and --start={path} to start from its parameters"
        )
    metrics = inside(path, "metrics.jsonl")
    if not in_bucket(path) and not exists(store.directory(path)) and exists(metrics) and metrics.stat().length:
        raise UserError(
            f"--workdir={path} has metrics of a run, but its checkpoints/ is missing: put it back, or use a new directory"
        )
    from xfresearch.runtime.hardware import describe_machine, git_commit, versions

    _set_damaged_aside(path)
    saved = read_json(inside(path, "config.json")) if exists(path / "config.json") else None
    steps = store.steps(path)
    if fork:
        check_fork(path, saved, config, steps)
    elif saved:
        changed = differences(saved, config, deciding=RESULT)
        if changed:
            text = "; ".join(changed)
            fork_helps = steps and saved.start == config.start
            or_fork = ", or --fork to resume from its newest checkpoint with this config" if fork_helps else ""
            raise UserError(f"--workdir={path} holds a run of another config ({text}): use a new directory{or_fork}")
    # Without config.json and checkpoints, earlier starts failed on a mistake in their config.
    before = starts(path) if saved or steps else []
    now = began or time.time()
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "seconds": now,
        "gap": max(now - _last_write(path, before), 0.0) if before else 0.0,
        "finished_before": bool(before) and saved is not None and (steps or [0])[-1] >= saved.steps,
        "command": list(command),
        "commit": git_commit(),
        "versions": versions(),
        "machine": describe_machine(),
    }
    write_json(path / "run.json", {"starts": [*before, start], "lineage": lineage(path) if before else []})


def saved_config(workdir) -> Config | None:
    """The config of the run in `workdir`; None if there is none, or if its config.json is damaged."""
    try:
        return read_json(inside(epath.Path(workdir).expanduser(), "config.json"))
    except UserError as error:
        if disk_errors(error):
            raise
        return None


def write_config(path: epath.Path, config: Config, tokenizer) -> None:
    """Writes config.json and tokenizer/, from which it then removes the files of another tokenizer: that before a fork."""
    if tokenizer is not None:
        tokenizer.save(str(inside(path, "tokenizer")))
    now = tokenizer.files if tokenizer else {}
    remove_files(path, "tokenizer", wrote=lambda name: is_tokenizer_file(name) and name not in now)
    write_json(path / "config.json", json.loads(to_json(config)))


def write_beginning(path: epath.Path, config: Config, tokenizer, origin: Origin | None) -> None:
    """Writes config.json, tokenizer/ and, of a run that begins, its origin. Every process calls this, and remembers on its
    machine that this user wrote the config."""

    def write() -> None:
        write_config(path, config, tokenizer)
        if origin is not None:  # a start that made no checkpoint may have begun from another model
            write_lineage(path, origin.lineage)
            source.replace(path, origin.source)

    distributed.run_on_first(write, "writing the config")
    remember(config)


def starts(path: epath.Path) -> list[dict]:
    """All starts of the run, from run.json. Raises UserError if it is damaged."""
    file = inside(path, "run.json")
    if not exists(file):
        return []
    return check(read_object(file), RUN, file)["starts"]


def lineage(path: epath.Path) -> list[dict]:
    """The trained models that the run started from, the nearest first: path, kind, step and digest of the parameters of
    each. [] for a run that started from new parameters, or if run.json is damaged."""
    file = inside(path, "run.json")
    try:
        return check(read_object(file), RUN, file).get("lineage") or []
    except UserError as error:
        if disk_errors(error):
            raise
        return []


def write_lineage(path: epath.Path, records: list[dict]) -> None:
    """Keeps the lineage of a run that begins in its run.json, also an empty one."""
    if records != lineage(path):
        write_json(path / "run.json", {"starts": starts(path), "lineage": records})


def record_resumed(path: epath.Path, words: str) -> None:
    """Says on standard error, and in run.json, with which checkpoint the newest start goes on."""
    print(f"resumes from {words}", file=sys.stderr)
    if before := starts(path):
        before[-1]["resumed"] = words
        write_json(path / "run.json", {"starts": before, "lineage": lineage(path)})


def _set_damaged_aside(path: epath.Path) -> None:
    """Moves a config.json or run.json that cannot be read to damaged/. The run writes both again: its checkpoints do
    not depend on them. A config.json with unknown keys is whole: it belongs to another version."""
    for name, read in (("config.json", read_object), ("run.json", lambda _: starts(path))):
        file = inside(path, name)
        if exists(file):
            try:
                read(file)
            except UserError as error:
                if disk_errors(error):
                    raise
                move_damaged(file, str(error))


def unproductive_time(all_starts: list[dict], until: float) -> dict[str, float]:
    """Seconds between `until`, the time of the checkpoint that the run resumes from, and its newest start: `lost` in
    work that was not saved, `down` while no process ran. The time after a run had finished counts as neither."""
    later = [start for start in all_starts if start["seconds"] > until]
    gaps = [min(start["gap"], start["seconds"] - until) for start in later]  # a checkpoint may be newer than the last row
    lost = all_starts[-1]["seconds"] - until - sum(gaps)
    down = sum(gap for gap, start in zip(gaps, later, strict=True) if not start["finished_before"])
    return {"lost": max(lost, 0.0), "down": down}


def restore_clock(clock: Clock, path: epath.Path, meta: dict) -> None:
    """Adds the time that the checkpoint of `meta` has counted, and the time lost since then."""
    clock.restore(meta.get("clock", {}))
    past = starts(path)
    if past:  # `train` called as a library function records no starts
        clock.restore(unproductive_time(past, meta.get("saved_at", past[0]["seconds"])))


def _last_write(path: epath.Path, before: list[dict]) -> float:
    """The time at which the previous process wrote its last row, or started. The times of the files do not show it: a copy
    of a run has those of the copying."""
    metrics = inside(path, "metrics.jsonl")
    return max(before[-1]["seconds"], last_written(metrics) if exists(metrics) else 0.0)
