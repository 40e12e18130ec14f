"""The settings of the model that a sublayer depends on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from xfresearch.models.norms import NormSpec


class Rows(NamedTuple):
    """What rows of training hold beside tokens, which limits the kernels."""

    segments: bool = False  # several documents, or padding
    prefixes: bool = False  # documents whose first tokens see each other


@dataclass(frozen=True)
class Place:
    """The place of a sublayer in the model. The module of a sublayer, its costs and its sizes depend only on this.

    options: the config of the sublayer, of the class that belongs to its kind.
    """

    width: int  # D of the residual stream
    max_length: int  # number of tokens for which positions, spans and capacities are made; 0: not known yet
    causal: bool
    dtype: str  # of the computation
    param_dtype: str
    init_std: float  # of kernels; 0: 1/sqrt(inputs)
    norm: NormSpec = NormSpec()  # norm of the block, for norms inside the sublayer
    options: Any = None
    input_width: int = 0  # width of the sublayer's input
    inner_scale: float = 1.0  # scale of the initial kernels before the last one
    output_scale: float = 1.0  # scale of the initial last kernel
    bare: bool = False  # it has no output matrix: the next sublayer reads its heads
    source_width: int = 0  # width W of the source that it reads; 0 for a sublayer that reads the stream alone
    source_length: int = 0  # number of tokens S of the source, for costs

    @property
    def read_width(self) -> int:
        """The width of the input of keys and values."""
        return self.source_width or self.width
