"""What a sublayer knows of the model around it."""

from dataclasses import dataclass
from typing import Any

from xfresearch.models.norms import NormSpec


@dataclass(frozen=True)
class Place:
    """Where a sublayer stands. Its module is made of this, its costs and sizes are computed from it.

    options: the sublayer's own config, of the class that its kind has.
    """

    width: int  # D of the residual stream
    max_length: int  # tokens that positions, spans and capacities are made for; 0 where it is not known yet
    causal: bool
    dtype: str  # of the computation
    param_dtype: str
    init_std: float  # of kernels; 0: 1/sqrt(inputs)
    norm: NormSpec = NormSpec()  # the block's, for norms inside the sublayer
    options: Any = None
    input_width: int = 0  # of what the sublayer reads
    inner_scale: float = 1.0  # of the first values of kernels that are not the sublayer's last
    output_scale: float = 1.0  # of those of its last kernel
    bare: bool = False  # it writes its hidden values without a last kernel: the sublayer after it reads them
