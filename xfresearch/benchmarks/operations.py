"""The time of an update by operation of its compiled program, from a profile of JAX, and the floor of each operation.

The floor of an operation is the longer of two times: its matrix products at the rate of the whole device, and the bytes that
it reads and writes at the rate of its memory. On a CPU, times are summed over threads, but a product that several threads
share counts once; and arrays that stay in the cache take less time than the floor.
"""

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from xfresearch.benchmarks.rounds import print_table
from xfresearch.training.timing import Timer

UPDATES = 10  # in the profile
SHOWN = 15
WAITS = re.compile(r"wait|Await")  # operations in which a thread waits for others
EXECUTOR = "ThunkExecutor::Execute"
INSTRUCTION = re.compile(r"^ *(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\((?:.*calls=%?([\w.-]+))?")
Event = tuple[str, float, float]  # name, beginning and duration in nanoseconds


def report(timer: Timer, dtype: str) -> list[dict]:
    """Prints and returns the operations of an update, the longest first: seconds, seconds of the floor, and the ratio of the
    two (None if the work of the operation is not known)."""
    from xfresearch.benchmarks.device_rates import rates

    seconds, (floors, known) = by_operation(timer), floors_by_operation(timer.compiled_text(), rates(dtype))
    total = sum(seconds.values())
    rows: list[dict] = []
    for name, own in seconds.items():
        floor = floors.get(name)
        rows.append({"operation": name, "seconds": own, "floor_seconds": floor, "floors": own / floor if floor else None})
    rest = {"operation": f"{max(len(rows) - SHOWN, 0)} others", "seconds": sum(row["seconds"] for row in rows[SHOWN:])}
    print()
    shown = [row | {"ms": 1e3 * row["seconds"], "share": row["seconds"] / total} for row in [*rows[:SHOWN], rest]]
    print_table({"ms": "{ms:.2f}", "share": "{share:.1%}", "floors": "{floors:.1f}", "operation": "{operation}"}, shown)
    speeds = rates(dtype)
    print(f"Floors: {speeds.flops_source}; {speeds.bytes_source}.{'' if known else ' This program could not be read.'}")
    return rows


def by_operation(timer: Timer) -> dict[str, float]:
    """{operation: seconds in one update}, the largest first; on a CPU summed over all threads. All operations with a matrix
    product count as one operation, and all others with a reduction as another. The rest have XLA's names, which list some of
    the fused operations. On a GPU, a kernel that belongs to no instruction of the program has the name of the kernel."""
    import jax

    kinds = kinds_of_instructions(timer.compiled_text())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(UPDATES):
                timer()
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    times: Counter = Counter()
    if jax.default_backend() == "cpu":
        lines = [line for plane in planes for line in plane.lines if line.name.startswith("tf_XLA")]
        for line in lines:
            times.update(own_times([(event.name, event.start_ns, event.duration_ns) for event in line.events], kinds))
    else:
        for events in _streams(planes):
            times.update(device_times(events, kinds))
    return {name: nanoseconds / 1e9 / UPDATES for name, nanoseconds in times.most_common()}


def _streams(planes) -> Iterable[list]:
    """The events of each stream of the first device: (kernel, instruction or '', nanoseconds)."""
    device = next(plane for plane in planes if plane.name.startswith("/device:"))
    for line in device.lines:
        if line.name.startswith("Stream") or line.name == "XLA Ops":
            yield [(event.name, str(dict(event.stats).get("hlo_op", "")), event.duration_ns) for event in line.events]


def device_times(events: Iterable[tuple[str, str, float]], kinds: Mapping[str, str]) -> dict[str, float]:
    """Nanoseconds of each kind of operation on a stream, whose kernels run one after another."""
    times: dict[str, float] = defaultdict(float)
    for kernel, instruction, duration in events:
        name = instruction or kernel
        times[kinds.get(name, without_number(name))] += duration
    return times


def without_number(name: str) -> str:
    return re.sub(r"[.\d]+$", "", name)


def floors_by_operation(text: str, rates) -> tuple[dict[str, float], bool]:
    """{operation, as in `by_operation`: seconds of its floor in one update}, and whether the program could be read."""
    from xfresearch.planning import hlo
    from xfresearch.planning.work import work

    kinds = kinds_of_instructions(text)
    floors: Counter = Counter()
    try:
        works = work(hlo.parse(text))
    except (KeyError, ValueError, IndexError, AttributeError, StopIteration):  # text of a version that it does not know
        return {}, False
    for each in works:
        floor = max(each.flops / rates.flops, each.bytes / rates.bytes)
        floors[kinds.get(each.name, without_number(each.name))] += each.runs * floor
    return dict(floors), True


def kinds_of_instructions(text: str) -> dict[str, str]:
    """{instruction: 'matrix products' or 'reductions'} of a compiled program, for those that are one or fuse one."""
    inside: dict[str, set[str]] = {}  # the operations of each computation
    fused: dict[str, tuple[str, str]] = {}  # {instruction: (operation, computation)}
    computation: set[str] = set()
    for line in text.splitlines():
        if line.endswith("{") and (begins := re.match(r"(?:ENTRY )?%?([\w.-]+) ", line)):
            computation = inside.setdefault(begins[1], set())
        elif found := INSTRUCTION.match(line):
            computation.add("dot" if "__cublas$" in line else found[2])
            fused[found[1]] = "dot" if "__cublas$" in line else found[2], found[3]
    kinds = {}
    for name, (operation, called) in fused.items():
        operations = {operation, *inside.get(called, ())}
        if operations & {"dot", "reduce"}:
            kinds[name] = "matrix products" if "dot" in operations else "reductions"
    return kinds


def own_times(events: Iterable[Event], kinds: Mapping[str, str]) -> dict[str, float]:
    """Nanoseconds of each kind of operation on one thread, without those of the operations that it calls."""
    times: dict[str, float] = defaultdict(float)
    calling: list[tuple[str, float]] = []  # the operations that have not ended: (kind, end)
    for name, begin, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while calling and begin >= calling[-1][1]:
            calling.pop()
        kind = "starting operations" if name == EXECUTOR else kinds.get(name, without_number(name))
        if calling:
            times[calling[-1][0]] -= duration
        times[kind] += duration
        calling.append((kind, begin + duration))
    return {kind: time for kind, time in times.items() if not WAITS.search(kind)}
