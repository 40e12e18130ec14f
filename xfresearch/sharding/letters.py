"""Dimension letters, and the mesh axes that shard a dimension of each letter.

Every dimension of a parameter or an activation has a letter (docs/glossary.md): D width, W width of the source, H heads,
G key-value heads, K head size, M memory slots, F hidden units, E experts, V vocabulary, L positions, and so on. The code
that creates a parameter gives its letters (models/parameters.py). Sharding, weight decay and Muon read them.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """The letters of a parameter's dimensions.

    inputs, outputs: the letters that a linear map reads and writes. A parameter that has them is a matrix, or one
    matrix for each index of its other dimensions. bounds: the smallest and the largest value that training may give it.
    bias: the name of the bias of a matrix, which is beside it if it exists; '' if the matrix cannot have one.
    """

    letters: str
    inputs: str = ""
    outputs: str = ""
    bounds: tuple[float, float] | None = None
    bias: str = ""

    @property
    def matrix(self) -> bool:
        return bool(self.inputs)


BATCH = ("data", "fsdp", "expert")  # the mesh axes that shard the rows of a batch

# letter: (mesh axes that shard it in a parameter, mesh axes that shard it in an activation)
SHARDED_BY = {
    "B": ((), BATCH),
    "L": ((), ("context",)),
    "V": (("tensor",), ("tensor",)),
    "D": (("fsdp",), ()),
    "W": (("fsdp",), ()),
    "H": (("tensor",), ("tensor",)),
    "G": (("tensor",), ("tensor",)),
    "F": (("tensor",), ("tensor",)),
    "E": (("expert",), ()),
}
# letter: (name of the dimension, the option that decides its size)
DIMENSIONS = {
    "B": ("the rows", "batch_size"),
    "L": ("the positions", "sequence_length"),
    "V": ("the vocabulary", "model.vocab_size"),
    "D": ("the width", "model.width"),
    "W": ("the width of the source", "model.stacks.encoder.width"),
    "H": ("the heads", "attention.heads"),
    "G": ("the key-value heads", "attention.kv_heads"),
    "F": ("the hidden units", "feed_forward.hidden"),
    "E": ("the experts", "feed_forward.moe.experts"),
}
# Never sharded: N layers, K head size, M slots, R distances, U lambda depth, S positions that every device needs,
# X residual streams, Y token types, Z rank of an adapter.
SHARDED_BY |= {letter: ((), ()) for letter in "NKMRUSXYZ"}


def row_parts(sizes) -> int:
    """The number of shards of the rows of a batch on a mesh of these sizes."""
    return math.prod(sizes[axis] for axis in BATCH)
