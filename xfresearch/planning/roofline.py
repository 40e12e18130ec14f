"""The time of a step, as a bracket.

Overlapped: everything runs beside everything else, so that the slowest resource alone decides: matrix products at the peak,
bytes at HBM's bandwidth, collectives at their links'. Not overlapped: one instruction after the other, each as long as the
slower of its products and its bytes, and every collective on its own, although the program may start it early.

Left out: products that fill the matrix unit badly, elementwise arithmetic beyond its bytes, waiting for input and hosts.
"""

from dataclasses import dataclass

from xfresearch.planning.chips import Chip
from xfresearch.planning.collectives import Collective
from xfresearch.planning.links import Place, seconds
from xfresearch.planning.topologies import Topology
from xfresearch.planning.work import Work


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step on each resource of a device, and of the work done one instruction after the other."""

    arithmetic: float
    memory: float
    links: float
    network: float
    instructions: float

    @property
    def overlapped(self) -> float:
        return max(self.arithmetic, self.memory, self.links, self.network)

    @property
    def serial(self) -> float:
        return self.instructions + self.links + self.network

    @property
    def limit(self) -> str:
        return max(("arithmetic", "memory", "links", "network"), key=lambda name: getattr(self, name))


def roofline(chip: Chip, works: list[Work], timed: list[tuple[Collective, float, float]], dtype: str) -> Roofline:
    """`timed`: each collective with the seconds of one run on links and network. dtype: that of the matrix products."""
    peak = chip.peak(dtype)
    during = {collective.name for collective, _, _ in timed}  # their bytes move while they run
    return Roofline(
        arithmetic=sum(w.runs * w.flops for w in works) / peak,
        memory=sum(w.runs * w.bytes for w in works) / chip.memory_bandwidth,
        links=sum(c.runs * inside for c, inside, _ in timed),
        network=sum(c.runs * between for c, _, between in timed),
        instructions=sum(
            w.runs * max(w.flops / peak, w.bytes / chip.memory_bandwidth) for w in works if w.name not in during
        ),
    )


def time_collectives(found: list[Collective], topology: Topology, where: list[Place]):
    return [(collective, *seconds(collective, topology, where)) for collective in found]
