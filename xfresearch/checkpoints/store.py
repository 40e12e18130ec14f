"""Asynchronous Orbax checkpoints, with a digest of every array that is verified on reading.

    <workdir>/checkpoints/<step>/params    nested dict of arrays, layers stacked
                                /ema       averaged parameters, if the run keeps them
                                /rest      optimizer state and counters, keyed by their paths as text
                                /meta      JSON: digests of the arrays, manifest, clock, metrics, and its own digest

Orbax writes under a temporary name and then renames; commit_success.txt is the last file. So a write that was killed or
failed never looks like a checkpoint. validity.py has the states of a checkpoint.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import jax
from etils import epath

from xfresearch.checkpoints import writing
from xfresearch.checkpoints.digests import changed, digests, is_weak
from xfresearch.checkpoints.pruning import Kept, reading
from xfresearch.checkpoints.validity import (
    VALIDATED,
    Corrupt,
    Deleted,
    NotGood,
    fault,
    fault_of_read,
    is_finite,
    is_published,
    is_rejected,
    reject,
    rejection,
)
from xfresearch.checkpoints.writing import orbax
from xfresearch.options.run_options import CheckpointConfig
from xfresearch.runtime import distributed
from xfresearch.runtime.errors import Stopped, UserError, disk_errors
from xfresearch.runtime.files import check_tree, exists, in_bucket, inside, names_in, read_object

ITEMS = ("params", "ema", "rest")
RETRY_SECONDS = (1, 2, 4)  # between two tries to read


def directory(workdir) -> epath.Path:
    """The directory of the checkpoints. Raises UserError if it is a link that leaves `workdir`."""
    return inside(epath.Path(workdir).expanduser().absolute(), "checkpoints")


def present(workdir) -> list[int]:
    """Steps of the directories that Orbax takes for checkpoints, ascending. On a local disk one may be incomplete: a copy
    that was not finished, or the rest of a deletion."""
    path = directory(workdir)
    numbers = [int(name) for name in names_in(path) if is_step(name)]
    return sorted(step for step in numbers if not in_bucket(path) or is_published(inside(path, str(step))))


def is_step(name: str) -> bool:
    """Whether a directory of this name may be the checkpoint of a step: digits as Python writes them."""
    return bool(re.fullmatch("0|[1-9][0-9]{0,18}", name))


def folder_of(workdir, step: int) -> epath.Path:
    """The directory of a checkpoint. Raises UserError if it is a link that leaves the one of the checkpoints."""
    return inside(directory(workdir), str(step))


def published(workdir) -> list[int]:
    """Steps with a published checkpoint, ascending."""
    return [step for step in present(workdir) if is_published(folder_of(workdir, step))]


def steps(workdir) -> list[int]:
    """Steps with a good checkpoint (validity.py), ascending."""
    return [step for step in published(workdir) if not is_rejected(folder_of(workdir, step))]


def agreed_steps(workdir) -> list[int]:
    """`steps` as process 0 lists them, because listings of other processes may be older. All processes call this."""
    return distributed.shared(steps(workdir))


def has_only_params(workdir) -> bool:
    """Whether the checkpoints in `workdir` hold parameters and no optimizer state (see `save_params`)."""
    saved = [folder_of(workdir, step) for step in published(workdir)]
    return bool(saved) and not any(exists(path / "rest") for path in saved)


def digest_of(workdir, step: int) -> str:
    """The digest of a whole checkpoint; '' if the checkpoint is gone, or is of an earlier version, which had no digests."""
    file = inside(folder_of(workdir, step), "meta", "metadata")
    with suppress(UserError):
        return read_object(file).get("digest", "")
    return ""


def _losses(workdir, text: str = "") -> dict[int, float]:
    """{step: finite held-out loss} of the good checkpoints that have one, of this text. A meta records the losses of all
    checkpoints that existed when it was saved, because the loss of a step may be measured after its checkpoint was saved."""
    metas = {}
    for step in steps(workdir):
        file = inside(folder_of(workdir, step), "meta", "metadata")
        with suppress(UserError):  # a damaged checkpoint is not the best one
            metas[step] = read_object(file)
    of_text = [meta for meta in metas.values() if meta.get("best_text", "") == text]
    losses = {int(step): loss for meta in of_text for step, loss in meta.get("losses", {}).items()}
    return {step: loss for step, loss in losses.items() if step in metas and is_finite(loss)}


class Checkpoints:
    """Writes the checkpoints of a run in the background, and deletes those that its policy (`kept`) does not keep. `text`
    names the text of the held-out losses: those of another text rank nothing."""

    def __init__(self, workdir, config: CheckpointConfig, text: str = ""):
        self.kept = Kept(config, {int(step): loss for step, loss in distributed.shared(_losses(workdir, text)).items()})
        self.config = config
        self.directory = directory(workdir)
        self.ocp = orbax()
        self.begun = time.monotonic()  # when the newest save began, or this object was made
        self.writing: int | None = None  # the step of the newest save
        options = {"preservation_policy": self.kept, "cleanup_tmp_directories": True}
        self.manager = _retried(lambda: writing.manager(self.directory, **options))  # it lists the directory

    def due(self, step: int, last: int) -> bool:
        """Whether to save after update `step`. Every process must call this after every update: the clock of process 0
        decides for all."""
        if step == last:
            return True
        if step % self.config.every:
            return False
        kept = bool(self.config.keep_every) and step % self.config.keep_every == 0
        if kept or not self.config.seconds:
            return True
        return distributed.shared(time.monotonic() - self.begun >= self.config.seconds)

    def add_loss(self, step: int, loss: float | None) -> None:
        """Ranks the checkpoint of `step` by its held-out loss, which may be measured after it was saved."""
        self.kept.losses |= {step: loss} if loss is not None and is_finite(loss) else {}

    def save(self, step: int, state: dict, meta: dict, loss: float | None = None) -> str:
        """Waits until the previous checkpoint is written, then starts writing `state`, and returns ''. A state that is not
        good is not written, and the reason is returned. The held-out `loss` ranks the checkpoint. `meta` has the
        `evaluation` of this state, if it was evaluated, and as `best_text` the text of the losses. Raises Stopped if a write
        failed."""
        self.wait()
        save = self.ocp.args
        items = items_of(state)
        reason = fault_before_writing(step, items, meta)
        if reason:
            return reason
        self.add_loss(step, loss)
        losses = {kept: self.kept.losses[kept] for kept in [*self.manager.all_steps(), step] if kept in self.kept.losses}
        meta = meta | {"step": step, "losses": losses, VALIDATED: True, "digests": digests(items)}
        arguments = {name: save.StandardSave(tree) for name, tree in items.items()}
        arguments["meta"] = save.JsonSave(with_digest(meta))
        self.writing, self.begun = step, time.monotonic()
        self._guard(lambda: self.manager.save(step, args=save.Composite(**arguments)))
        return ""

    def prove(self, step: int) -> None:
        """Records that all states up to `step` are known to be good: its held-out loss, or the next update, is finite."""
        self.kept.proven = max(self.kept.proven, step)

    def reject_unproven(self, reason: str) -> None:
        """Rejects the checkpoints after the last state that is known to be good, for `reason`. All processes call this."""
        self.wait()  # a checkpoint that is still being written may be good
        distributed.run_on_first(lambda: self._reject_unproven(reason), "rejecting checkpoints")

    def _reject_unproven(self, reason: str) -> None:
        for step in steps(self.directory.parent):
            if step > self.kept.proven:
                reject(folder_of(self.directory.parent, step), reason)

    def wait(self) -> None:
        """Returns when everything is written. Raises Stopped if a write failed."""
        self._guard(self.manager.wait_until_finished)

    def close(self) -> None:
        self._guard(self.manager.close)

    def _guard(self, action) -> None:
        try:
            action()
        except Exception as error:  # full disk, lost mount: the type that Orbax raises depends on the file system
            if distributed.is_active() and distributed.COLLECTIVE.search(reason_of(error)):
                raise  # a lost process is reported as such, not as a failed write
            kept = published(self.directory.parent)
            if self.writing in kept:  # it was written; the error came from deleting another one
                print(f"warning: an old checkpoint could not be removed: {reason_of(error)}", file=sys.stderr)
                return
            last = f"the last checkpoint, step {kept[-1]}, is intact" if kept else "there is no earlier checkpoint"
            cause = error if disk_errors(error) else _refusal(self.directory) or error
            raise Stopped(f"a checkpoint could not be written ({reason_of(error)}); {last}") from cause


def _refusal(path: epath.Path) -> OSError | None:
    """The error of a directory that cannot be listed. Orbax hides it: it treats files that it cannot list as missing."""
    try:
        names_in(path)
    except OSError as error:
        return error
    return None


def restore(workdir, step: int, abstract_state: dict) -> tuple[dict, dict]:
    """The training state of `step`, with the shardings of `abstract_state`, and the checkpoint's meta. Raises Unusable if
    the checkpoint is damaged, is not good, or was deleted meanwhile."""
    items, meta = _read_good(workdir, step, items_of(abstract_state))
    return state_of(items, abstract_state), meta


def restore_params(workdir, step: int, abstract_params: dict, named: bool = False) -> dict:
    """The parameters of `step` for evaluation: averaged if the run keeps averages. Raises Unusable as `restore` does. If the
    user has `named` the step, or the checkpoint has parameters alone, parameters that are not good give only a warning."""
    path = folder_of(workdir, step)
    name = "ema" if _retried(lambda: exists(path / "ema")) else "params"
    chosen = named or not _retried(lambda: exists(path / "rest"))
    return _read_good(workdir, step, {name: abstract_params}, chosen)[0][name]


def save_params(workdir, step: int, params: dict) -> None:
    """Writes a checkpoint of parameters alone. It is complete when this returns."""
    ocp = orbax()
    good = {} if fault({"params": params}, {}) else {VALIDATED: True}
    with writing.manager(directory(workdir)) as manager:
        meta = with_digest({"step": step, **good, "digests": digests({"params": params})})
        items = {"params": ocp.args.StandardSave(params), "meta": ocp.args.JsonSave(meta)}
        manager.save(step, args=ocp.args.Composite(**items))


def items_of(state: dict) -> dict:
    """The items of a checkpoint: params, ema and rest. Optax's types in `rest` become one flat dict."""
    flat, _ = jax.tree_util.tree_flatten_with_path({k: v for k, v in state.items() if k not in ITEMS[:2]})
    items = {"params": state["params"], "rest": {jax.tree_util.keystr(path): leaf for path, leaf in flat}}
    return items | ({"ema": state["ema"]} if "ema" in state else {})


def state_of(items: dict, abstract_state: dict) -> dict:
    """The training state whose items these are."""
    flat, structure = jax.tree_util.tree_flatten_with_path(
        {k: v for k, v in abstract_state.items() if k not in ITEMS[:2]}
    )
    rest = jax.tree.unflatten(structure, [items["rest"][jax.tree_util.keystr(path)] for path, _ in flat])
    return {**rest, **{name: items[name] for name in ITEMS[:2] if name in items}}


def fault_before_writing(step: int, items: dict, meta: dict) -> str:
    """`fault` of a state that is about to be saved. `meta` has its `evaluation`, if it was evaluated. All processes call
    this."""
    return fault(items, meta.get("evaluation", {}) if meta.get("evaluated") == step else {})


def _read_good(workdir, step: int, wanted: dict, chosen: bool = False) -> tuple[dict, dict]:
    """`_read`. If the checkpoint is not good, raises NotGood in every process, or warns if the user has `chosen` it."""
    items, meta = _read(workdir, step, wanted)
    reason = distributed.first_message(rejection(folder_of(workdir, step)) or fault_of_read(items, meta))
    if reason and not chosen:
        raise NotGood(step, reason)
    if reason and distributed.first():
        print(f"warning: {workdir}: {NotGood(step, reason)}", file=sys.stderr)
    return items, meta


def _read(workdir, step: int, wanted: dict) -> tuple[dict, dict]:
    """The items `wanted` of a checkpoint, and its meta. All processes raise the same error: Deleted if the checkpoint was
    deleted, Stopped if one of them cannot read the files, which proves no damage, Corrupt if one of them finds damage."""
    arrays = {}
    meta = {}
    damage = ""
    unread = None
    deleted = False
    path = folder_of(workdir, step)
    check_tree(directory(workdir), str(step))
    try:
        with reading(path) as there:
            if not there:
                raise Deleted(step)
            arrays, meta = _retried(lambda: read_files(path, wanted))
        recorded = meta["digests"] if "digests" in meta else meta["fingerprints"]  # of an earlier version
        recorded = {path: value for path, value in recorded.items() if path.split("/")[0] in wanted}
    except Exception as error:  # the type depends on where the file is truncated or altered
        deleted = isinstance(error, Deleted) or _is_gone(path)
        if disk_errors(error):
            unread = error
        else:
            damage = reason_of(error)
    if distributed.first_message("deleted" if deleted else ""):
        raise Deleted(step)
    message = distributed.first_message(reason_of(unread) if unread else "")
    if message:
        raise Stopped(f"checkpoint {step} in {workdir} cannot be read, but may be intact: {message}") from unread
    agree(step, damage)  # before the digests, which all processes compute together
    other = changed(recorded, arrays)
    agree(step, f"{other} does not have the digest that was recorded with it" if other else "")
    if is_weak(recorded) and distributed.first():
        print(
            f"checkpoint {step} in {workdir} is weakly checked: its sums, of an earlier version, miss some changes",
            file=sys.stderr,
        )
    return arrays, meta


def _is_gone(path: epath.Path) -> bool:
    """Whether a checkpoint that was published no longer is. False if the disk cannot tell."""
    try:
        return not is_published(path)
    except OSError:
        return False


def _retried(read: Callable):
    """read(), tried again while the disk or the network fails. Any other error is tried once more, because Orbax reports a
    file as missing if the disk fails while it looks for the file."""
    for seconds in RETRY_SECONDS:
        try:
            return read()
        except Exception as error:
            if not disk_errors(error):
                break
        time.sleep(seconds)
    return read()


def with_digest(meta: dict) -> dict:
    """`meta` in JSON's types, with a digest of all of it."""
    meta = json.loads(json.dumps(meta, default=float))
    return meta | {"digest": _digest(meta)}


def _digest(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def reason_of(error: BaseException) -> str:
    """The original cause of an error, in one line. Orbax wraps it in errors that only describe Orbax."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_files(path: epath.Path, wanted: dict) -> tuple[dict, dict]:
    """The items `wanted` in the directory of a checkpoint, and its meta. Each process reads on its own: if one fails, the
    others do not wait for it in a barrier of Orbax. Raises an error of any type if a file is missing or damaged."""
    for name in ("meta", *wanted):
        if not exists(path / name):  # raises an error of the disk
            raise FileNotFoundError(f"{path / name} is missing")
    ocp = orbax()
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    meta = ocp.Checkpointer(ocp.JsonCheckpointHandler(), multiprocessing_options=alone).restore(path / "meta")
    recorded = meta.pop("digest", None)  # None: a checkpoint of an earlier version
    if recorded not in (None, _digest(meta)):
        raise ValueError("meta does not have the digest that was recorded with it")
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as reader:
        return {name: reader.restore(path / name, tree) for name, tree in wanted.items()}, meta


def agree(step: int, damage: str) -> None:
    """Raises Corrupt in every process if `damage` is not empty in any of them."""
    damage = distributed.first_message(damage)
    if damage:
        raise Corrupt(step, damage)
