"""Which checkpoints a run keeps, and how it deletes the others while other processes may read them.

A reader on this machine holds a shared lock on the checkpoint's directory. The run deletes a checkpoint only if it gets the
exclusive lock; otherwise it tries again after a later save. Buckets and some file systems have no locks: there a reader may
find that the checkpoint is gone (store.py), and reads another one.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
from etils import epath

from xfresearch.checkpoints.validity import PUBLISHED
from xfresearch.options.run_options import CheckpointConfig
from xfresearch.runtime.files import in_bucket, inside, open_lock, remove


class Kept:
    """The policy of a run: the newest checkpoints, every n-th, the one with the lowest loss (the newest of equal ones), and
    the last that is known to be good. Orbax's own policy forgets the losses of checkpoints that an earlier process saved.

    `losses` are {step: finite held-out loss}. States up to the step `proven` are known to be good: the held-out loss, or
    the next update, was finite.
    """

    def __init__(self, config: CheckpointConfig, losses: dict[int, float]):
        self.config = config
        self.losses = losses
        self.proven = -1

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Orbax's interface: whether to keep each of the checkpoints, which are in ascending order."""
        steps = [each.step for each in checkpoints]
        kept = {*steps[-self.config.keep :], *[step for step in steps if step <= self.proven][-1:]}
        if self.config.keep_every:
            kept |= {step for step in steps if step % self.config.keep_every == 0}
        known = [(self.losses[step], -step) for step in steps if step in self.losses]
        if self.config.keep_best and known:
            kept.add(-min(known)[1])
        return [step in kept for step in steps]


class Pruner:
    """Orbax's deleter of old checkpoints, which first unpublishes them, and postpones those that are being read."""

    def __init__(self, deleter, directory: epath.Path):
        self.deleter = deleter
        self.directory = directory
        self.postponed: list[int] = []

    def delete_steps(self, steps: Sequence[int]) -> None:
        due, self.postponed = [*self.postponed, *steps], []
        for step in due:
            self.delete(step)

    def delete(self, step: int) -> None:
        if jax.process_index() != 0:
            return  # process 0 deletes
        path = inside(self.directory, str(step))
        with _lock(path, exclusive=True) as free:
            if not free:
                self.postponed.append(step)
                return
            remove(path / PUBLISHED)
            self.deleter.delete(step)

    def close(self) -> None:
        self.deleter.close()


@contextmanager
def reading(path: epath.Path) -> Iterator[bool]:
    """Keeps a checkpoint from being deleted during a `with` block. Yields False if its deletion has begun."""
    with _lock(path, exclusive=False) as free:
        yield free


@contextmanager
def _lock(path: epath.Path, exclusive: bool) -> Iterator[bool]:
    """Locks a directory, if it can be locked, and yields True; False if another process holds a lock that excludes this
    one."""
    import fcntl

    try:
        descriptor = None if in_bucket(path) else open_lock(path, os.O_RDONLY)
    except OSError:  # the caller gets the same error when it reads the directory
        descriptor = None
    if descriptor is None:
        yield True
        return
    try:
        free = True
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:  # no locks on this file system
            pass
        yield free
    finally:
        os.close(descriptor)
