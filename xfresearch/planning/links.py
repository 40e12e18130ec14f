"""How long a collective takes on a machine's links, from where the devices of its group stand.

Inside a slice devices stand in a torus and every dimension that a group spans brings its links: both directions of a ring
where the torus is closed and the group is all of it, one on a line. The formulas are those of "How To Scale Your Model",
part 3: for an array of V bytes over n devices with W bytes per second into each,

    all-gather, reduce-scatter   V (n-1)/n / W          all-reduce   twice that
    all-to-all                   V k / 4 / W            along the longest dimension k (V: what one device holds)
    permutation                  V * hops / W           of one link

and at least HOP seconds for each hop. A group whose members are not neighbours shares its links with the groups between
them. Between slices (or hosts) each device first sends its share over the network.
"""

from dataclasses import dataclass

from xfresearch.planning.collectives import Collective
from xfresearch.planning.topologies import Topology

HOP = 1e-6  # seconds a message needs to the next chip, from the same source


@dataclass(frozen=True)
class Place:
    slice: int
    chip: tuple[int, ...]  # coordinates in the slice's torus


@dataclass(frozen=True)
class Span:
    """What a group covers of one dimension of the torus: members, their distance, whether they close a ring."""

    members: int
    distance: float
    ring: bool

    @property
    def width(self) -> float:
        """Links into a member, shared ones in part."""
        return (2 if self.ring else 1) / self.distance

    @property
    def hops(self) -> float:
        return (self.members - 1) * self.distance / (2 if self.ring else 1)


def places(topology: Topology, devices) -> list[Place]:
    """Where each of the mesh's devices stands, in the mesh's order; GPUs of a host share a switch, so any number will do."""

    def chip(device) -> tuple[int, ...]:
        return tuple(device.coords[: len(topology.shape)]) if topology.tpu else (device.id,)

    return [Place(getattr(device, "slice_index", None) or 0, chip(device)) for device in devices]


def seconds(collective: Collective, topology: Topology, where: list[Place]) -> tuple[float, float]:
    """Seconds that one run takes on the links inside slices and on the network between them."""
    group = [where[device] for device in collective.group]
    slices = len({place.slice for place in group})
    inside = [place for place in group if place.slice == group[0].slice]
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


def _inside(collective: Collective, topology: Topology, group: list[Place]) -> float:
    n = len({place.chip for place in group})
    if n == 1:
        return 0.0
    cores = len(group) / n  # devices of one chip that share its links in this group
    link = topology.chip.link * cores
    if topology.chip.switched:
        moved = collective.sent if len(collective.group) == len(group) else collective.payload
        return moved / link + HOP
    spans = _spans(topology, group)
    if collective.kind == "collective-permute":
        return collective.payload * _distance(topology, group) / link + HOP
    if "all-to-all" in collective.kind:
        return max(collective.payload * cores * s.members / (4 * link * s.width) for s in spans) + HOP * _hops(spans)
    both = 2 if collective.kind == "all-reduce" else 1
    time = collective.payload * (n - 1) / n / (link * sum(s.width for s in spans))
    return both * max(time, HOP * _hops(spans))


def _hops(spans: list[Span]) -> float:
    return sum(span.hops for span in spans)


def _spans(topology: Topology, group: list[Place]) -> list[Span]:
    found = []
    for dimension, size in enumerate(topology.shape):
        at = sorted({place.chip[dimension] for place in group})
        if len(at) > 1:
            ring = len(at) == size and size > 2 and topology.wraps(dimension)
            found.append(Span(len(at), (at[-1] - at[0]) / (len(at) - 1), ring))
    return found


def _distance(topology: Topology, chain: list[Place]) -> float:
    """Hops between neighbours of a chain, on average."""
    total = 0
    for here, there in zip(chain, chain[1:], strict=False):
        for dimension, size in enumerate(topology.shape):
            apart = abs(here.chip[dimension] - there.chip[dimension])
            total += min(apart, size - apart) if topology.wraps(dimension) else apart
    return max(total / max(len(chain) - 1, 1), 1)
