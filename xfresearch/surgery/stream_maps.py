"""The parameters that read and write the residual stream."""

from dataclasses import replace

import numpy as np

from xfresearch.models.linear_terms import LinearTerm, output_biases
from xfresearch.surgery.network import End, Network, inside
from xfresearch.surgery.refused import refuse_unless


def tables(network: Network) -> list[str]:
    """Paths of the tables that write the first residual stream. Their last dimension is D."""
    return [path for path in ("embed/table", "position/table", "token_type/table") if path in network.outside]


def readers(network: Network, number: int, *sublayers: str) -> list[LinearTerm]:
    """The linear terms that read the input of sublayers of a layer."""
    return [term for term in network.terms(number, *sublayers) if term.reads]


def writers(network: Network, number: int, *sublayers: str) -> list[LinearTerm]:
    """The linear terms whose sum is the output of sublayers of a layer, without biases."""
    return [term for term in network.terms(number, *sublayers) if term.writes]


def last_maps(network: Network, number: int, sublayer: str) -> list[str]:
    """Paths of the last kernels of a sublayer and of their biases, whose sum is its output. The last dimension of each is
    D. Raises Refused if the output has other terms."""
    options, kernels = getattr(network.layers[number].block, sublayer), writers(network, number, sublayer)
    given = options.identities.get("output", "")
    option = f" with output={given!r}" if given else ""
    refuse_unless(
        bool(kernels) and not given,
        f"layer {number}: {sublayer} of kind {options.kind!r}{option} writes its heads, and no matrix after them",
    )
    biases = output_biases(inside(network.axes(number), sublayer))
    return sorted([term.kernel for term in kernels] + [f"{sublayer}/{path}" for path in biases])


def with_end(network: Network, matrix_ED: np.ndarray, bias_D: np.ndarray) -> Network:
    """The network whose readers of the output y of its final norm read y M + b: the head, which is not tied, or
    cross-attention in the decoder of an encoder."""
    if network.stack:
        return replace(network, end=End(matrix_ED, bias_D))
    head_VD = network.outside["head/table"]
    new: dict[str, np.ndarray | None] = {"head/table": head_VD @ matrix_ED.T}
    if not bias_D.any():
        return network.with_outside(new)
    old = network.outside.get("head_bias/bias", 0.0)
    new["head_bias/bias"] = network.model.head_factor * (head_VD @ bias_D) + old
    return network.with_outside(new, head_bias=True)


def product(matrix_ED: np.ndarray, kernel: np.ndarray, at: int) -> np.ndarray:
    """The kernel of the matrix times a linear map W, for y M W instead of x W. `at` is the place of D in W's kernel."""
    return np.moveaxis(np.tensordot(matrix_ED, kernel, (1, at)), 0, at)
