"""Checkpoints: Orbax, asynchronous, each with a fingerprint of every array, so that damage is found when it is read.

    <workdir>/checkpoints/<step>/params    nested dict of arrays, layers stacked
                                /ema       averaged parameters, where the run keeps them
                                /rest      optimiser state and counters, by the text of their paths
                                /meta      JSON: fingerprints, clock, metrics
Orbax writes under a temporary name and renames, or in a bucket writes commit_success.txt last, so that a killed or failed
write never looks like a checkpoint.
"""

import logging
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from xfresearch import distributed
from xfresearch.config import CheckpointConfig
from xfresearch.errors import Stopped

ITEMS = ("params", "ema", "rest")


class Corrupt(Exception):
    """A checkpoint that cannot be read back as it was written."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"checkpoint {step} is damaged: {reason}")
        self.step, self.reason = step, reason


@cache
def _orbax():
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # what goes wrong is raised too, and said in one line
    sys.unraisablehook = _without_abandoned(sys.unraisablehook)
    return ocp


@cache
def _manager_class():
    class Manager(_orbax().CheckpointManager):
        def reached_preemption(self, step: int) -> bool:
            """Never. JAX agrees on the step to stop at by the highest number that any process has asked about: the loop
            counts its questions from 0, and Orbax would ask about `step`, after which a resumed run misses the notice."""
            return False

    return Manager


def _without_abandoned(hook):
    """`hook`, for exceptions that nobody can catch, without those of arrays that Orbax gives up once one of them fails.

    Each prints pages when it is dropped, or when TensorStore's threads are done with it: at times after the line that says
    what failed.
    """

    def quieter(unraisable):
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        dropped = code is not None and "orbax" in code.co_filename
        if not dropped and str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    return quieter


def directory(workdir) -> epath.Path:
    return epath.Path(workdir).expanduser().absolute() / "checkpoints"


def in_bucket(path) -> bool:
    """Whether `path` is an address (gs://...), whose files cannot be locked, appended to or renamed."""
    return "://" in str(path)


def steps(workdir) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    path = directory(workdir)
    return sorted(int(p.name) for p in path.iterdir() if _complete(p)) if path.exists() else []


def _complete(path: epath.Path) -> bool:
    return path.name.isdigit() and (not in_bucket(path) or (path / "commit_success.txt").exists())


def of_model_alone(workdir) -> bool:
    """Whether the checkpoints in `workdir` hold parameters and no state of training (`save_params`)."""
    saved = [directory(workdir) / str(step) for step in steps(workdir)]
    return bool(saved) and not any((path / "rest").exists() for path in saved)


def set_aside(workdir, step: int) -> epath.Path:
    """Moves a damaged checkpoint out of the way, so that its step can be written again; returns where it lies now."""
    source = directory(workdir) / str(step)
    target = source.parent.parent / "damaged" / f"{step}-{len(list(source.parent.parent.glob('damaged/*')))}"
    target.parent.mkdir(exist_ok=True)
    source.rename(target)
    return target


class Checkpoints:
    """Writes a run's checkpoints in the background and keeps the newest, every n-th and the best of them."""

    def __init__(self, workdir, config: CheckpointConfig):
        ocp = _orbax()
        from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

        policies = [keep.LatestN(config.keep)]
        if config.keep_every:
            policies.append(keep.EveryNSteps(config.keep_every))
        if config.keep_best:
            best = keep.BestN(
                get_metric_fn=lambda m: m["loss"], reverse=True, n=1, keep_checkpoints_without_metrics=False
            )
            policies.append(best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keep.AnyPreservationPolicy(policies), cleanup_tmp_directories=True
        )
        self.directory, self.ocp = directory(workdir), ocp
        self.manager = _manager_class()(self.directory, options=options)

    def save(self, step: int, state: dict, meta: dict, loss: float | None = None) -> None:
        """Starts writing `state`; `loss` (validation, nats per token) ranks it. Stopped where an earlier write failed."""
        save = self.ocp.args
        items = _items(state)
        meta = meta | {"step": step, "fingerprints": fingerprints(items)}
        arguments = {name: save.StandardSave(tree) for name, tree in items.items()} | {"meta": save.JsonSave(meta)}
        metrics = None if loss is None else {"loss": loss}
        self._guard(lambda: self.manager.save(step, args=save.Composite(**arguments), metrics=metrics))

    def wait(self) -> None:
        """Returns once everything is written; Stopped where it could not be."""
        self._guard(self.manager.wait_until_finished)

    def close(self) -> None:
        self._guard(self.manager.close)

    def _guard(self, action) -> None:
        try:
            action()
        except Exception as error:  # a full disk, a lost mount: what Orbax raises differs by file system
            if distributed.several() and distributed.COLLECTIVE.search(_reason(error)):
                raise  # another process is gone: that is said, and not that a write failed
            kept = steps(self.directory.parent)
            last = f"the last checkpoint, step {kept[-1]}, is intact" if kept else "there is no earlier checkpoint"
            raise Stopped(f"a checkpoint could not be written ({_reason(error)}); {last}") from error


def restore(workdir, step: int, abstract_state: dict) -> tuple[dict, dict]:
    """The training state of `step`, straight onto the shardings in `abstract_state`, and its meta. Corrupt if damaged."""
    wanted = _items(abstract_state)
    found, meta = _read(workdir, step, wanted)
    flat, structure = jax.tree_util.tree_flatten_with_path(
        {k: v for k, v in abstract_state.items() if k not in ITEMS[:2]}
    )
    rest = structure.unflatten([found["rest"][jax.tree_util.keystr(path)] for path, _ in flat])
    return {**rest, **{name: found[name] for name in ITEMS[:2] if name in found}}, meta


def restore_params(workdir, step: int, abstract_params: dict) -> dict:
    """The parameters of `step` that evaluation uses: averaged ones where the run keeps them. Corrupt if damaged."""
    name = "ema" if (directory(workdir) / str(step) / "ema").exists() else "params"
    return _read(workdir, step, {name: abstract_params})[0][name]


def save_params(workdir, step: int, params: dict) -> None:
    """A checkpoint of parameters alone, complete when this returns."""
    ocp = _orbax()
    with ocp.CheckpointManager(directory(workdir)) as manager:
        meta = ocp.args.JsonSave({"step": step, "fingerprints": fingerprints({"params": params})})
        manager.save(step, args=ocp.args.Composite(params=ocp.args.StandardSave(params), meta=meta))


def _items(state: dict) -> dict:
    """`state` as the items of a checkpoint: the optimiser's own types become one flat dict."""
    flat, _ = jax.tree_util.tree_flatten_with_path({k: v for k, v in state.items() if k not in ITEMS[:2]})
    items = {"params": state["params"], "rest": {jax.tree_util.keystr(path): leaf for path, leaf in flat}}
    return items | ({"ema": state["ema"]} if "ema" in state else {})


def _read(workdir, step: int, wanted: dict) -> tuple[dict, dict]:
    """The items `wanted` of a checkpoint and its meta. Corrupt in all processes where any of them finds it damaged."""
    found, meta, damage = {}, {}, ""
    try:
        found, meta = _read_files(directory(workdir) / str(step), wanted)
        written = {k: v for k, v in meta["fingerprints"].items() if k.split("/")[0] in wanted}
    except Exception as error:  # what a truncated or altered file raises depends on where it is cut
        damage = _reason(error)
    _agree(step, damage)  # before the fingerprints, which take all processes
    actual = fingerprints(found)
    changed = [name for name, value in written.items() if actual.get(name) != value]
    _agree(step, f"{changed[0]} does not have the fingerprint that it was written with" if changed else "")
    return found, meta


def _reason(error: BaseException) -> str:
    """One line of the first cause: what Orbax wraps it in is about Orbax."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def _read_files(path: epath.Path, wanted: dict) -> tuple[dict, dict]:
    """Each process reads by itself: one that fails does not leave the others waiting in a barrier of Orbax."""
    ocp, index = _orbax(), jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
    meta = ocp.Checkpointer(ocp.JsonCheckpointHandler(), multiprocessing_options=alone).restore(path / "meta")
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as reader:
        return {name: reader.restore(path / name, tree) for name, tree in wanted.items()}, meta


def _agree(step: int, damage: str) -> None:
    damage = distributed.first_word(damage)
    if damage:
        raise Corrupt(step, damage)


def fingerprints(items: dict) -> dict[str, int]:
    """A number for each array that changes when any of its bits does; the same on any mesh."""
    flat, _ = jax.tree_util.tree_flatten_with_path(items)
    values = _fingerprint_all([leaf for _, leaf in flat])
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): int(v)
        for (path, _), v in zip(flat, values, strict=True)
    }


@jax.jit
def _fingerprint_all(leaves: list) -> list:
    return [_fingerprint(leaf) for leaf in leaves]


def _fingerprint(x):
    """Sum over elements of (bits times an odd number that depends on the element's place), modulo 2^32."""
    bits = np.dtype(x.dtype).itemsize * 8
    words = jax.lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)
    place, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride % 2**32)
        stride *= words.shape[axis]
    odd = place * np.uint32(2 * 2654435761 % 2**32) + np.uint32(1)
    return jnp.sum(words * odd, dtype=jnp.uint32)
