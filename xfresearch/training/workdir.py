"""A run's directory: who may write in it, and what is recorded about the run.

config.json   the resolved config           run.json     versions, commit, machine and command line of every start
tokenizer/    what turns text into tokens   metrics.jsonl, tensorboard/, checkpoints/, report.html
errors/       of many processes, what each that ended badly said last
"""

import dataclasses
import json
import sys
import time
from contextlib import contextmanager

from etils import epath

from xfresearch import distributed
from xfresearch.checkpoints import store
from xfresearch.checkpoints.store import in_bucket
from xfresearch.config.comparing import differences
from xfresearch.config.files import read_json
from xfresearch.config.reading import from_dict, to_json
from xfresearch.config.run import Config
from xfresearch.errors import UserError
from xfresearch.files import write_json


@contextmanager
def claimed(workdir):
    """Holds a run's directory for this process; UserError while another one trains in it (local directories only)."""
    path = epath.Path(workdir).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not in_bucket(workdir):
            (path / ".lock").write_text("")
    except OSError as error:
        raise UserError(f"--workdir={workdir}: cannot be written: {error.strerror or error}") from error
    if in_bucket(workdir):
        yield path
        return
    import fcntl

    with open(path / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--workdir={workdir}: another process is training in it") from error
        yield path


def require_same(config: Config) -> None:
    """UserError, in every process, where one of many was given another config than the first: they would wait for each
    other for ever, or compute something else."""
    if distributed.several():
        first = from_dict(Config, distributed.shared(dataclasses.asdict(config)))
        lines = differences(first, config, deciding=("function", "initialisation", "training", "execution"))
        word = distributed.first_word("; ".join(lines))
        if word:
            raise UserError(f"every process needs the config that process 0 has: {word}")


def record(path: epath.Path, config: Config, fork: bool) -> None:
    """Adds this start to run.json, with what `goodput` needs to know of the time before it.

    UserError, listing the differences, where the directory holds a run of another config and `fork` is not given; and
    where it holds a model alone.
    """
    if store.of_model_alone(path):
        raise UserError(
            f"--workdir={path} holds a model that was imported or saved, with no optimiser's state to go on from: use a "
            "new directory"
        )
    from xfresearch.hardware import describe_machine, git_commit, versions

    saved = read_json(path / "config.json") if (path / "config.json").exists() else None
    if saved:
        changed = differences(saved, config, deciding=("function", "initialisation", "training"))
        if changed and not fork:
            text = "; ".join(changed)
            raise UserError(
                f"--workdir={path} holds a run of another config ({text}): use a new directory, or --fork to go on from "
                "its newest checkpoint with this config"
            )
    before, now = starts(path) if saved else [], time.time()  # none of those that ended with a mistake in the config
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "seconds": now,
        "gap": max(now - _last_sign_of_life(path), 0.0) if before else 0.0,
        "finished_before": bool(before) and (store.steps(path) or [0])[-1] >= saved.steps,
        "command": ["python", "-m", "xfresearch.train", *sys.argv[1:]],
        "commit": git_commit(),
        "versions": versions(),
        "machine": describe_machine(),
    }
    write_json(path / "run.json", {"starts": [*before, start]})


def keep(path: epath.Path, config: Config, tokenizer) -> None:
    """Writes tokenizer/, where there is a tokenizer, and config.json: what is in the directory is of this config from now
    on."""
    folder = path / "tokenizer"
    if tokenizer is None and folder.exists():
        folder.rmtree()
    if tokenizer is not None:
        tokenizer.save(str(folder))
        for file in folder.iterdir():
            if file.name not in tokenizer.files:  # of the tokenizer before a fork
                file.unlink()
    write_json(path / "config.json", json.loads(to_json(config)))


def starts(path: epath.Path) -> list[dict]:
    """Every start of the run, as run.json has them."""
    file = path / "run.json"
    return json.loads(file.read_text())["starts"] if file.exists() else []


def time_gone(all_starts: list[dict], until: float) -> dict[str, float]:
    """Seconds that went to nothing between `until`, when the checkpoint that a run goes on from was made, and its newest
    start: `lost` in work that was not saved, `down` while no process ran. Rest after a finished run is neither."""
    later = [start for start in all_starts if start["seconds"] > until]
    lost = all_starts[-1]["seconds"] - until - sum(start["gap"] for start in later)
    return {"lost": max(lost, 0.0), "down": sum(s["gap"] for s in later if not s["finished_before"])}


def _last_sign_of_life(path: epath.Path) -> float:
    """When the process before last wrote anything."""
    files = [path / "run.json", path / "metrics.jsonl", store.directory(path)]
    return max(file.stat().mtime for file in files if file.exists())
