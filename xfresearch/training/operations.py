"""The time of an update by operation of its compiled program, from a profile of JAX. Only on a CPU."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from xfresearch.errors import UserError

UPDATES = 10  # that are profiled
PRODUCTS = re.compile(r"dot|ynn_fusion|gemm|matmul")  # names of XLA's matrix products: its own, YNNPACK's, oneDNN's
WAITS = re.compile(r"wait|Await")  # of a thread for others
EXECUTOR = "ThunkExecutor::Execute"
Event = tuple[str, float, float]  # name, beginning and duration in nanoseconds


def by_operation(update: Callable[[], object]) -> dict[str, float]:
    """{operation: seconds in one update, summed over all threads}, the largest first. Fused operations without a matrix
    product have XLA's name, which lists some of what was fused. Raises UserError on other devices than a CPU."""
    import jax

    if jax.default_backend() != "cpu":
        raise UserError(f"--by-operation is not allowed on {jax.default_backend()}: it is for a CPU; others have profiles")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(UPDATES):
                update()
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        lines = [line for plane in planes for line in plane.lines if line.name.startswith("tf_XLA")]
        events = [[(event.name, event.start_ns, event.duration_ns) for event in line.events] for line in lines]
    found = Counter()
    for line in events:
        found.update(own_times(line))
    return {name: nanoseconds / 1e9 / UPDATES for name, nanoseconds in found.most_common()}


def own_times(events: Iterable[Event]) -> Counter:
    """Nanoseconds of each kind of operation on one thread, without those of the operations that it calls."""
    found, calling = Counter(), []
    for name, begin, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while calling and begin >= calling[-1][1]:
            calling.pop()
        kind = _kind(name)
        if calling:
            found[calling[-1][0]] -= duration
        found[kind] += duration
        calling.append((kind, begin + duration))
    return Counter({kind: time for kind, time in found.items() if not WAITS.search(kind)})


def _kind(name: str) -> str:
    if PRODUCTS.search(name):
        return "matrix products"
    return "starting operations" if name == EXECUTOR else re.sub(r"[.\d]+$", "", name)
