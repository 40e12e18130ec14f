"""Roofline estimate of a step's time, as a lower and an upper value.

Overlapped: all resources work at the same time, and the slowest one decides. Matrix products run at the chip's peak,
bytes at HBM bandwidth, collectives at the bandwidth of their links. Not overlapped: instructions run one after another,
each as long as the slower of its products and its bytes; collectives run alone, although the program may start them
early.

Not included: matrix products that use the matrix unit poorly, the arithmetic of elementwise operations (only their
bytes count), and waiting for input or for other hosts.
"""

from dataclasses import dataclass

from xfresearch.planning.chips import Chip
from xfresearch.planning.collectives import Collective
from xfresearch.planning.links import Location, seconds
from xfresearch.planning.topologies import Topology
from xfresearch.planning.work import Work


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step on each resource of a device; `instructions`: all but collectives, one after another."""

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
    """timed: each collective with the seconds of one run on links and network. dtype: of the matrix products."""
    peak = chip.peak(dtype)
    timed_names = {collective.name for collective, _, _ in timed}  # the time of their bytes is part of their own time
    return Roofline(
        arithmetic=sum(w.runs * w.flops for w in works) / peak,
        memory=sum(w.runs * w.bytes for w in works) / chip.memory_bandwidth,
        links=sum(c.runs * inside for c, inside, _ in timed),
        network=sum(c.runs * between for c, _, between in timed),
        instructions=sum(
            w.runs * max(w.flops / peak, w.bytes / chip.memory_bandwidth) for w in works if w.name not in timed_names
        ),
    )


def time_collectives(collectives: list[Collective], topology: Topology, where: list[Location]):
    return [(collective, *seconds(collective, topology, where)) for collective in collectives]
