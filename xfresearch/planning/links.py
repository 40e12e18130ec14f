"""Estimates how long a collective takes on a machine's links, from the locations of the devices in its group.

Inside a slice the devices form a torus. A group uses the links of every dimension that it extends along: both
directions of a ring if the torus is closed and the group covers the whole dimension, one direction on a line otherwise.
The formulas are from "How To Scale Your Model", part 3. For an array of V bytes over n devices with W bytes per second
into each:

    all-gather, reduce-scatter   V (n-1)/n / W          all-reduce   twice that
    all-to-all                   V k / 4 / W            k: the longest dimension; V: the bytes on one device
    permutation                  V * hops / W           W: one link

Each hop takes at least HOP seconds. A group whose members are not neighbours shares its links with the groups in
between. GPUs of a host share a switch, so n is the number of members there. Between slices (or hosts) each device sends
its shard over the network.
"""

from dataclasses import dataclass

from xfresearch.planning.collectives import Collective
from xfresearch.planning.topologies import Topology

HOP = 1e-6  # seconds for a message to reach the next chip; same source


@dataclass(frozen=True)
class Location:
    slice: int
    chip: tuple[int, ...]  # coordinates in the slice's torus


@dataclass(frozen=True)
class Extent:
    """A group's extent along one dimension of the torus."""

    members: int
    distance: float  # in hops between neighbouring members
    ring: bool

    @property
    def width(self) -> float:
        """Links into a member; a link shared with other groups counts as a fraction."""
        return (2 if self.ring else 1) / self.distance

    @property
    def hops(self) -> float:
        """Hops from one end of the line to the other; half of that on a ring."""
        return (self.members - 1) * self.distance / (2 if self.ring else 1)


def locations(topology: Topology, devices) -> list[Location]:
    """The location of each device, in the mesh's order. For GPUs, which share a switch, the coordinate is the id."""

    def chip(device) -> tuple[int, ...]:
        return tuple(device.coords[: len(topology.shape)]) if topology.tpu else (device.id,)

    return [Location(getattr(device, "slice_index", None) or 0, chip(device)) for device in devices]


def seconds(collective: Collective, topology: Topology, where: list[Location]) -> tuple[float, float]:
    """Seconds of one run: (on the links inside slices, on the network between them)."""
    group = [where[device] for device in collective.group]
    slices = len({location.slice for location in group})
    inside = [location for location in group if location.slice == group[0].slice]
    return _inside(collective, topology, inside), _between(collective, topology, slices, len(inside))


def _between(collective: Collective, topology: Topology, slices: int, inside: int) -> float:
    if slices == 1:
        return 0.0
    share = (
        collective.payload / inside
        if collective.kind in ("all-gather", "reduce-scatter", "all-reduce")
        else collective.payload
    )
    if collective.kind != "collective-permute":
        share *= (slices - 1) / slices
    return share * (2 if collective.kind == "all-reduce" else 1) / topology.chip.network


def _inside(collective: Collective, topology: Topology, group: list[Location]) -> float:
    n = len({location.chip for location in group})
    if n == 1:
        return 0.0
    cores = len(group) / n  # devices of this group on each chip, which share its links
    link = topology.chip.link * cores
    if topology.chip.switched:
        return _through_switch(collective, n) / link + HOP
    extents = _extents(topology, group)
    if collective.kind == "collective-permute":
        return collective.payload * _distance(topology, group) / link + HOP
    if "all-to-all" in collective.kind:
        slowest = max(collective.payload * cores * e.members / (4 * link * e.width) for e in extents)
        return slowest + HOP * _hops(extents)
    phases = 2 if collective.kind == "all-reduce" else 1  # reduce-scatter, then all-gather
    time = collective.payload * (n - 1) / n / (link * sum(e.width for e in extents))
    return phases * max(time, HOP * _hops(extents))


def _through_switch(collective: Collective, n: int) -> float:
    """Bytes that a device sends to the n members on its own host: all but its share of the array, and twice that for an
    all-reduce. An all-to-all has an equal part for each member, also on other hosts."""
    if collective.kind in ("collective-permute", "collective-broadcast"):
        return collective.payload
    parts = len(collective.group) if "all-to-all" in collective.kind else n
    return collective.payload * (n - 1) / parts * (2 if collective.kind == "all-reduce" else 1)


def _hops(extents: list[Extent]) -> float:
    return sum(extent.hops for extent in extents)


def _extents(topology: Topology, group: list[Location]) -> list[Extent]:
    extents = []
    for dimension, size in enumerate(topology.shape):
        at = sorted({location.chip[dimension] for location in group})
        if len(at) > 1:
            ring = len(at) == size and size > 2 and topology.wraps(dimension)
            extents.append(Extent(len(at), (at[-1] - at[0]) / (len(at) - 1), ring))
    return extents


def _distance(topology: Topology, chain: list[Location]) -> float:
    """The average number of hops between neighbours of a chain, at least 1."""
    total = 0
    for source, target in zip(chain, chain[1:], strict=False):
        for dimension, size in enumerate(topology.shape):
            apart = abs(source.chip[dimension] - target.chip[dimension])
            total += min(apart, size - apart) if topology.wraps(dimension) else apart
    return max(total / max(len(chain) - 1, 1), 1)
