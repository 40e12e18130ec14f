"""f(x), without a skip: the next sublayer reads the output alone."""

from dataclasses import dataclass

from xfresearch.models.connections.connection import Connection


@dataclass(frozen=True)
class Unskipped(Connection):
    """gain * f(x)."""

    adds_to = "nothing"
