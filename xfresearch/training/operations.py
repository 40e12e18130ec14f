"""The time of an update by operation of its compiled program, from a profile of JAX. Only on a CPU."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from xfresearch.errors import UserError
from xfresearch.training.timing import Timer

UPDATES = 10  # in the profile
WAITS = re.compile(r"wait|Await")  # of a thread for others
EXECUTOR = "ThunkExecutor::Execute"
INSTRUCTION = re.compile(r"^ *(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\((?:.*calls=%?([\w.-]+))?")
Event = tuple[str, float, float]  # name, beginning and duration in nanoseconds


def by_operation(timer: Timer) -> dict[str, float]:
    """{operation: seconds in one update, summed over all threads}, the largest first. Operations with a matrix product are
    one, and so are the others with a reduction; the rest have XLA's names, which list some of what was fused. Raises
    UserError on other devices than a CPU."""
    import jax

    if jax.default_backend() != "cpu":
        raise UserError(f"--by-operation is not allowed on {jax.default_backend()}: it is for a CPU; others have profiles")
    kinds = kinds_of_instructions(timer.compiled_text())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(UPDATES):
                timer()
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        lines = [line for plane in planes for line in plane.lines if line.name.startswith("tf_XLA")]
        events = [[(event.name, event.start_ns, event.duration_ns) for event in line.events] for line in lines]
    found = Counter()
    for line in events:
        found.update(own_times(line, kinds))
    return {name: nanoseconds / 1e9 / UPDATES for name, nanoseconds in found.most_common()}


def kinds_of_instructions(text: str) -> dict[str, str]:
    """{instruction: 'matrix products' or 'reductions'} of a compiled program, for those that are one or fuse one."""
    inside, fused, computation = {}, {}, set()  # the operations of each computation; {instruction: (operation, computation)}
    for line in text.splitlines():
        if line.endswith("{") and (name := re.match(r"(?:ENTRY )?%?([\w.-]+) ", line)):
            computation = inside.setdefault(name[1], set())
        elif found := INSTRUCTION.match(line):
            computation.add(found[2])
            fused[found[1]] = found[2], found[3]
    kinds = {}
    for name, (operation, called) in fused.items():
        operations = {operation, *inside.get(called, ())}
        if operations & {"dot", "reduce"}:
            kinds[name] = "matrix products" if "dot" in operations else "reductions"
    return kinds


def own_times(events: Iterable[Event], kinds: Mapping[str, str]) -> Counter:
    """Nanoseconds of each kind of operation on one thread, without those of the operations that it calls."""
    found, calling = Counter(), []
    for name, begin, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while calling and begin >= calling[-1][1]:
            calling.pop()
        kind = "starting operations" if name == EXECUTOR else kinds.get(name, re.sub(r"[.\d]+$", "", name))
        if calling:
            found[calling[-1][0]] -= duration
        found[kind] += duration
        calling.append((kind, begin + duration))
    return Counter({kind: time for kind, time in found.items() if not WAITS.search(kind)})
