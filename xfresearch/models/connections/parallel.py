"""Sublayers of one block that do not follow each other in the residual stream."""

from dataclasses import dataclass

from xfresearch.models.connections.connection import Connection


@dataclass(frozen=True)
class SharedInput(Connection):
    """x + gain * f(n), where n is what the sublayer before it read: one norm serves both (GPT-J, PaLM)."""

    reads = "before"


@dataclass(frozen=True)
class BlockInput(Connection):
    """x + f(norm(z)), where z is the input of the block (GPT-NeoX)."""

    reads = "block"


@dataclass(frozen=True)
class OntoBlock(Connection):
    """z + f(x), where z is the input of the block: one skip goes around several sublayers."""

    adds_to = "block"
