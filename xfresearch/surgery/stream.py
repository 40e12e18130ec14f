"""The parameters that read and write the residual stream."""

import numpy as np

from xfresearch.kernels.blocked_rows import BIAS
from xfresearch.models.block_config import BlockConfig
from xfresearch.sharding.letters import Axes
from xfresearch.surgery.network import Network
from xfresearch.surgery.refused import refuse_unless


def tables(network: Network) -> list[str]:
    """Paths of the tables that write the first residual stream. Their last dimension is D."""
    return [path for path in ("embed/table", "position/table") if path in network.outside]


def first_maps(axes: dict[str, Axes], *sublayers: str) -> dict[str, int]:
    """{path of a kernel: the place of D among its dimensions} of the linear maps that read the input of sublayers."""
    inside = _inside(axes, sublayers)
    return {path: each.letters.index("D") for path, each in inside.items() if each.inputs == "D"}


def last_kernels(axes: dict[str, Axes], *sublayers: str) -> list[str]:
    """Paths of the kernels whose sum is the output of sublayers, without biases. The last dimension of each is D."""
    return [path for path, each in _inside(axes, sublayers).items() if each.outputs == "D"]


def last_maps(block: BlockConfig, axes: dict[str, Axes], sublayer: str, where: str) -> list[str]:
    """Paths of the last kernels of a sublayer and of their biases, whose sum is its output. The last dimension of each is
    D. Raises Refused if the output has other terms."""
    options = getattr(block, sublayer)
    kernels = last_kernels(axes, sublayer)
    refuse_unless(
        bool(kernels) and getattr(options, "output", "learned") == "learned",
        f"{where}: {sublayer} of kind {options.kind!r} with output='identity' writes its heads, and no matrix after them",
    )
    inside = _inside(axes, [sublayer])
    biases = [path for path, each in inside.items() if each.letters in ("D", "ED") and path.endswith("bias")]
    return [path for path in inside if path in kernels or path in biases]


def product(matrix_ED: np.ndarray, kernel: np.ndarray, at: int) -> np.ndarray:
    """The kernel of the matrix times a linear map W, for y M W instead of x W. `at` is the place of D in W's kernel."""
    return np.moveaxis(np.tensordot(matrix_ED, kernel, (1, at)), 0, at)


def bias_of(kernel: str) -> str:
    """The path of the bias of the linear map whose kernel has this path."""
    return f"{kernel.removesuffix('/kernel')}/bias" if kernel.endswith("/kernel") else f"{kernel}{BIAS}"


def _inside(axes: dict[str, Axes], sublayers) -> dict[str, Axes]:
    prefixes = tuple(f"{name}/" for name in sublayers)
    return {path: each for path, each in axes.items() if path.startswith(prefixes)}
