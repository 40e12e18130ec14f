"""The states of a checkpoint, and the one definition of a good one.

    written      under a temporary name
    validated    `fault` has found none: parameters, averages, optimizer state and the held-out loss are finite
    published    renamed; commit_success.txt is the last file that is written, and the first one that is deleted
    rejected     published, but no later update was finite: the file `rejected` in it says why
    read         a local reader holds a shared lock (pruning.py)
    deleted      unpublished, then removed (pruning.py)

A good checkpoint is published and not rejected. Only good ones are the default step of a command, the checkpoint that a run
resumes from, the best one, the ones that are kept, and the "last good checkpoint" of a run that has diverged. A step that
the user names may be any.
"""

import math
import sys
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from etils import epath

from xfresearch.runtime.files import exists, inside, read_bytes, write_text
from xfresearch.runtime.trees import by_path

PUBLISHED = "commit_success.txt"  # Orbax writes it last
REJECTED = "rejected"
T = TypeVar("T")
VALIDATED = "validated"  # a key of meta. Checkpoints of earlier versions have none: they are validated when they are read


class Unusable(Exception):
    """A checkpoint that is not chosen by default."""

    def __init__(self, step: int, reason: str):
        super().__init__(f"checkpoint {step} {reason}")
        self.step = step


class Corrupt(Unusable):
    """A damaged checkpoint: what was read differs from what was written, or cannot be read."""

    def __init__(self, step: int, reason: str):
        super().__init__(step, f"is damaged: {reason}")
        self.reason = reason


class Deleted(Unusable):
    """A checkpoint that was there when the steps were listed, and was deleted before it was read."""

    def __init__(self, step: int):
        super().__init__(step, "was deleted by the run meanwhile")


class NotGood(Unusable):
    """An intact checkpoint of a state that is not good."""

    def __init__(self, step: int, reason: str):
        super().__init__(step, f"is not good: {reason}")


def is_finite(loss: float | None) -> bool:
    """Whether there is a loss, and it is finite. In JSON, a loss that is not finite may be null."""
    return loss is not None and math.isfinite(loss)


def fault(items: dict, evaluation: dict) -> str:
    """Why a state is not good; '' if it is. items: a nested dict of arrays, which may be sharded over processes: all
    processes call this. evaluation: a dict with the held-out `loss` of this state, or {}."""
    if bad := not_finite(items):
        more = f" and {len(bad) - 1} more" if bad[1:] else ""
        return f"{bad[0]}{more} has values that are not finite"
    if evaluation and not is_finite(evaluation["loss"]):
        return "its held-out loss is not finite"
    return ""


def not_finite(tree) -> list[str]:
    """The paths of the arrays with a value that is not finite. The arrays may be sharded over processes: all call this."""
    floats = {path: leaf for path, leaf in by_path(tree).items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    finite = jax.device_get(_all_finite(list(floats.values())))
    return [path for path, good in zip(floats, finite, strict=True) if not good]


@jax.jit
def _all_finite(leaves: list) -> list:
    """Whether each array is finite. The sum of its values times 0 is 0 if all of them are, and NaN otherwise. (A maximum
    over several processes may lose NaN.) On a CPU it takes half the time of `isfinite` of every value."""
    return [jnp.isfinite(jnp.sum(leaf * 0)) for leaf in leaves]


def fault_of_read(items: dict, meta: dict) -> str:
    """`fault` of the items of a checkpoint that were read; '' if the checkpoint was validated when it was written."""
    if VALIDATED in meta:
        return ""
    measured = meta.get("evaluated") == meta.get("step")
    return fault(items, meta.get("evaluation", {}) if measured else {})


def is_published(path: epath.Path) -> bool:
    """Whether the checkpoint in a directory was written to its end, and its deletion has not begun."""
    return exists(path / PUBLISHED)


def reject(path: epath.Path, reason: str) -> None:
    """Marks a published checkpoint as one that is not good."""
    write_text(path / REJECTED, f"{reason}\n")


def is_rejected(path: epath.Path) -> bool:
    return exists(path / REJECTED)


def rejection(path: epath.Path) -> str:
    """Why a checkpoint was rejected; '' if it was not."""
    if not is_rejected(path):
        return ""
    return " ".join(read_bytes(inside(path, REJECTED)).decode(errors="replace").split())[:300] or "it was rejected"


def newest_good(steps: Callable[[], list[int]], read: Callable[[int], T], where: str = "") -> tuple[int, T] | None:
    """(step, read(step)) of the last of `steps()` (ascending) for which `read` does not raise Unusable; None if there is
    none. The steps are listed again after each failure: a run may have deleted some, and saved newer ones.

    A warning on standard error names each checkpoint that could not be used, with `where` in front.
    """
    tried = set()
    while left := [step for step in steps() if step not in tried]:
        tried.add(left[-1])
        try:
            return left[-1], read(left[-1])
        except Unusable as error:
            print(f"warning: {where}{error}; trying another", file=sys.stderr)
    return None
