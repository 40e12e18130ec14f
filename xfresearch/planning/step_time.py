"""The time of a step: a roofline estimate, as a lower and an upper value, and the expected one, from measured updates.

Overlapped: all resources work at the same time, and the slowest one decides. Matrix products run at the chip's peak,
bytes at HBM bandwidth, collectives at the bandwidth of their links. Not overlapped: instructions run one after another,
each as long as the slower of its products and its bytes; collectives run alone, although the program may start them
early.

Not included: matrix products that use the matrix unit poorly, the arithmetic of elementwise operations (only their
bytes count), and waiting for input or for other hosts.

The expected time rests on updates measured on accelerators. Model-FLOPs utilisation counts three times the FLOPs of the
forward pass, attention in full, over the chip's peak for bfloat16 (xfresearch/runtime/hardware.py). All updates: bfloat16,
one device, the best settings that were tried.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

from xfresearch.models.model_config import mixtures
from xfresearch.planning.chips import Chip
from xfresearch.planning.collectives import Collective
from xfresearch.planning.links import Location, seconds
from xfresearch.planning.topologies import Topology
from xfresearch.planning.work import Work
from xfresearch.run_config.config import Config

DTYPE = "bfloat16"


@dataclass(frozen=True)
class Measured:
    chip: str  # a key of CHIPS
    model: str
    width: int  # of the residual stream
    experts: bool  # whether the model has a mixture of experts
    utilisation: float
    settings: str
    source: str


_H200 = "one H200, 2026-11-27, commit f688592, jax 0.11.2, CUDA 13"
MEASURED = (
    Measured("h200", "gpt2 124M", 768, False, 0.410, "32 x 1024, V 50304, unrolled, loss_rows 32768", _H200),
    Measured("h200", "llama 953M", 2048, False, 0.496, "16 x 2048, scanned", _H200),
    Measured("h200", "moe 510M", 1024, True, 0.110, "32 x 1024, expert_kernel=ragged, loss_rows 8192", _H200),
)


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


def most_similar(chip: str, config: Config, rows: Iterable[Measured] = MEASURED) -> Measured | None:
    """The update on this chip of the model that is most like the config's: with experts or without, of the nearest width.
    None if nothing like it was measured there."""
    experts = any(mixtures(config.model))
    alike = [row for row in rows if (row.chip, row.experts, DTYPE) == (chip, experts, config.model.dtype)]
    return min(alike, key=lambda row: abs(log(row.width / config.model.width)), default=None)


def expected_seconds(row: Measured, ideal: float, recomputed: float, collectives: float) -> float:
    """Seconds of a step that computes as well as the measured one, and in which no collective overlaps.

    ideal: seconds of the model's FLOPs at the peak. recomputed: FLOPs of the step over the model's. collectives: seconds.
    """
    return ideal * max(recomputed, 1) / row.utilisation + collectives
