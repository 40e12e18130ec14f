"""Letters of dimensions, and which mesh axes shard a dimension with each letter.

Every dimension of a parameter or an activation has a letter (docs/glossary.md): D width, H heads, G key-value heads,
K head size, M memory slots, F hidden units, E experts, V vocabulary, L positions, and so on. A parameter's letters are given
where it is created (models/parameters.py); sharding, weight decay and Muon read them.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """The letters of a parameter's dimensions.

    inputs, outputs: the letters that a linear map reads and writes; a parameter that has them is a matrix, or one matrix for
    each index of its other dimensions. bounds: the least and the largest value that training may give it.
    """

    letters: str
    inputs: str = ""
    outputs: str = ""
    bounds: tuple[float, float] | None = None

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
    "H": (("tensor",), ("tensor",)),
    "G": (("tensor",), ("tensor",)),
    "F": (("tensor",), ("tensor",)),
    "E": (("expert",), ()),
}
# Never sharded: N layers, K head size, M slots, R distances, U lambda depth, S positions that every device needs.
SHARDED_BY |= {letter: ((), ()) for letter in "NKMRUS"}


def row_parts(sizes) -> int:
    """The number of shards that a mesh of these sizes makes of the rows of a batch."""
    return math.prod(sizes[axis] for axis in BATCH)
