"""x + f(x), with constant or trained factors of both terms."""

from dataclasses import dataclass

from xfresearch.models.connections.connection import Connection, Factor


@dataclass(frozen=True)
class Residual(Connection):
    """skip * x + gain * f(x)."""


@dataclass(frozen=True)
class DeepNorm(Residual):
    """alpha x + f(x), alpha = (2 depth)^(1/4), with initial kernels scaled by (8 depth)^(-1/4): the constants of a decoder
    (Wang et al. 2022, table 2)."""

    skip: Factor = Factor(lambda depth: (2 * depth) ** 0.25)

    def kernel_scale(self, depth: int) -> float:
        return (8 * depth) ** -0.25


HALF = Factor(0.5)
# A trained number. He & Hofmann (2023) start the feed-forward's at 0.1 at 18 layers, proportional to 1/sqrt(depth) (their
# code).
TRAINED = Factor(1.0, trained=True)
TRAINED_SMALL = Factor(lambda depth: 0.1 * (18 / depth) ** 0.5, trained=True, optional=True)
