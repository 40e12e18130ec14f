"""Saving a checkpoint, beside saving as earlier versions did, which recorded sums (modulo 2^32) and did not check that the
state is finite; and the time of each check alone.

    python -m xfresearch.bench save --megabytes 1024

A round saves float32 parameters of that size to a directory of --directory, twice in each way, as A B B A: later saves of a
round wait longer for the disk. The save before these four is not counted, because one that follows a pause takes up to twice
as long. The time is that until everything is on the disk; a run goes on while the files are written. It prints medians, and
the ratio of a round's saves, with its quartiles. A disk's noise is larger than the checks: --directory=/dev/shm has none.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

from xfresearch.benchmarks.flags import add_json, add_sizes, write_figures
from xfresearch.benchmarks.rounds import print_table, quartiles, seconds_of

ARRAYS = 8


def add_flags(parser) -> None:
    add_sizes(parser, {"megabytes": 1024, "rounds": 5})
    parser.add_argument("--directory", metavar="DIR", help="an existing one, on the disk to measure")
    add_json(parser)


def run(a) -> None:
    import tempfile

    import jax
    import numpy as np

    from xfresearch.checkpoints import store
    from xfresearch.checkpoints.digests import digests, weak_sums
    from xfresearch.checkpoints.validity import fault
    from xfresearch.options.run_options import CheckpointConfig
    from xfresearch.runtime.errors import UserError
    from xfresearch.runtime.progress import stage

    shape = (a.megabytes // (4 * ARRAYS), 1024, 1024)
    if not shape[0]:
        raise UserError(f"--megabytes={a.megabytes} is not allowed: it must be at least {4 * ARRAYS}")
    drawn = jax.jit(lambda key: jax.random.normal(key, shape))
    params = {str(number): drawn(jax.random.key(number)) for number in range(ARRAYS)}
    ways: dict[str, Callable[[], AbstractContextManager]] = {
        "now": nullcontext,
        "before": lambda: mock.patch.multiple(store, digests=weak_sums, fault=lambda *_: ""),
    }
    checks = {"digests": digests, "sums": weak_sums, "finite": lambda items: fault(items, {})}
    rounds = []
    with tempfile.TemporaryDirectory(dir=a.directory) as directory, stage("timing", a.rounds + 1, "rounds") as progress:
        checkpoints = store.Checkpoints(directory, CheckpointConfig(keep=1, keep_best=False))
        for number in range(a.rounds + 1):
            each: dict = {}
            outer, inner = ("now", "before") if number % 2 else ("before", "now")
            for turn, way in enumerate((outer, outer, inner, inner, outer)):
                with ways[way]():
                    seconds = seconds_of(_save, checkpoints, 5 * number + turn, params)
                if turn:  # the first save is slower than others, and not counted
                    each[way] = each.get(way, 0) + seconds / 2
            each |= {name: seconds_of(check, {"params": params}) for name, check in checks.items()}
            rounds += [each] if number else []  # the first round compiles
            progress.update(1)
        checkpoints.close()
    medians = {name: float(np.median([row[name] for row in rounds])) for name in rounds[0]}
    ratios = [each["now"] / each["before"] for each in rounds]
    row = medians | dict(zip(("ratio", "lower", "upper"), quartiles("ratio", ratios).values(), strict=True))
    print_table({name: f"{{{name}:.3f}}" for name in row}, [row])
    print("The first five are seconds.")
    write_figures(a, {"row": row, "rounds": rounds})


def _save(checkpoints, step: int, params: dict) -> None:
    import jax

    checkpoints.save(step, {"params": params, "step": jax.numpy.int32(step)}, {})
    checkpoints.wait()
