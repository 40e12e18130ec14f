"""Orbax's checkpoint manager with five changes, and a writer of the shards of one process (emergency.py).

The manager leaves notices of preemption to the training loop. It renames the directory of a checkpoint only when all files
are on the disk. It deletes no checkpoint that a reader has locked. If a write fails, Orbax abandons the other arrays, and
their errors are not printed (the same holds for the writer of shards). Orbax waits as long as it should when the system's
clock is set meanwhile.
"""

import asyncio
import errno
import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from etils import epath

from xfresearch.checkpoints.pruning import Pruner
from xfresearch.runtime.files import in_bucket, sync


@cache
def orbax():
    """The module orbax.checkpoint, which is slow to import."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.futures import future, signaling_client

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # errors are raised too, and reported in one line
    sys.unraisablehook = _without_orbax_noise(sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_not_of_abandoned_array)
    for waiting in (future, signaling_client):
        waiting.time = SimpleNamespace(**vars(time) | {"time": time.monotonic})  # else a clock set forward ends a wait
    return ocp


def manager(directory: epath.Path, **options):
    """A CheckpointManager for `directory`. `options` are those of orbax.checkpoint.CheckpointManagerOptions."""
    if not in_bucket(directory):  # a bucket has no rename: there Orbax writes a marker last
        options["temporary_path_class"] = _synced_path_class()
    return _manager_class()(directory, options=orbax().CheckpointManagerOptions(**options))


@cache
def _manager_class():
    base: Any = orbax().CheckpointManager

    class Manager(base):
        _checkpoint_deleter: Pruner

        def __init__(self, directory: epath.Path, **options):
            super().__init__(directory, **options)
            self._checkpoint_deleter = Pruner(self._checkpoint_deleter, directory)  # Orbax has no public hook

        def reached_preemption(self, step: int) -> bool:
            """False, without a question to JAX.

            The training loop asks JAX about the numbers 0, 1, 2, ..., and JAX stops all processes at the highest number that
            one of them has asked about. Orbax would ask about `step`. In a resumed run this is a higher number than the
            loop's, so the loop would go on long after the notice.
            """
            return False

    return Manager


def shards_writer(names: Sequence[str]):
    """An AsyncCheckpointer of items with these `names`. This process writes the shards of its own devices with it, and waits
    for no other process."""
    ocp = orbax()
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process-{index}"
    )
    # Without a replica's number, each shard of this process is written once. By default only the first replica writes.
    shards = ocp.type_handlers.ArrayHandler(primary_host=index, replica_id=None, use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, shards))
    # The signals of directories that are made in the background have the same names in all processes.
    made_first = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    arrays = partial(ocp.PyTreeCheckpointHandler, multiprocessing_options=alone, type_handler_registry=registry)
    handlers = {name: arrays() for name in names}
    handlers["meta"] = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    composite = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(
            multiprocessing_options=alone, async_options=made_first, temporary_path_class=_synced_path_class()
        ),
        **handlers,
    )
    return ocp.AsyncCheckpointer(
        composite, async_options=made_first, multiprocessing_options=alone, temporary_path_class=_synced_path_class()
    )


def write_shards(writer, path: epath.Path, items: dict, meta: dict) -> None:
    """Starts writing the shards of `items` and `meta` to the directory `path` with a `shards_writer`."""
    save = orbax().args
    arguments = {name: save.PyTreeSave(tree) for name, tree in items.items()} | {"meta": save.JsonSave(meta)}
    writer.save(path, args=save.Composite(**arguments))


@cache
def _synced_path_class():
    base: Any = orbax().path.atomicity.AtomicRenameTemporaryPath

    class Synced(base):
        async def finalize(self) -> None:
            """Renames the directory when its files are on the disk. After an earlier rename, a crash of the machine could
            leave a checkpoint of empty files, and the previous one may be deleted by then."""
            await asyncio.to_thread(_sync_tree, self.get())
            _require_manifest(Path(self.get()))
            await super().finalize()  # writes a few files itself
            await asyncio.to_thread(_sync_finalized, self.get_final())

    return Synced


def _sync_tree(directory: epath.Path) -> None:
    """Syncs a directory and all that is in it. Raises OSError if a part of it cannot be listed (rglob would skip it)."""

    def fail(error: OSError):
        raise error

    for parent, _, files in os.walk(directory, onerror=fail):
        for path in [*(Path(parent) / name for name in files), Path(parent)]:
            sync(path)


def _require_manifest(directory: Path) -> None:
    """Raises OSError if `directory` has the arrays of processes but not the manifest that joins them. Orbax finds the arrays
    with a glob, which skips a directory that cannot be listed; it would then delete the previous checkpoint."""
    names = os.listdir(directory)
    if any(name.startswith("ocdbt.process_") for name in names) and "manifest.ocdbt" not in names:
        raise OSError(errno.EIO, "its arrays were not joined, there is no manifest.ocdbt", str(directory))


def _sync_finalized(directory: epath.Path) -> None:
    for path in [*(path for path in directory.iterdir() if path.is_file()), directory, directory.parent]:
        sync(path)


def _without_orbax_noise(hook):
    """`hook` for unraisable exceptions, without the exceptions of arrays that Orbax abandons after one of them has failed.

    Each of them would print pages when it is garbage-collected or when TensorStore's threads finish, sometimes after the
    line that gives the error.
    """

    def quieter(unraisable):
        code = getattr(unraisable.object, "cr_code", None)  # set if the object is a coroutine
        if not _of_orbax(code) and str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    return quieter


def _not_of_abandoned_array(record: logging.LogRecord) -> bool:
    """Whether asyncio's log keeps a record. It drops failures of Orbax's tasks that nothing has awaited: an abandoned array
    whose read failed too, before it was garbage-collected."""
    _, _, traceback = record.exc_info or (None, None, None)
    unawaited = "exception was never retrieved" in record.getMessage()
    return not (unawaited and traceback is not None and _of_orbax(traceback.tb_frame.f_code))


def _of_orbax(code) -> bool:
    """Whether a code object (or None) is Orbax's."""
    return code is not None and "orbax" in code.co_filename
