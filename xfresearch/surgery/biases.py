"""Biases of linear maps, which conversions add to and make."""

import numpy as np

from xfresearch.models.sublayer import SublayerConfig
from xfresearch.surgery.network import Params
from xfresearch.surgery.refused import Refused, refuse_unless


def with_biases(options: SublayerConfig, parts: set[str]) -> SublayerConfig:
    """`options` with biases on these linear maps. Raises Refused if one of them has no place for a bias."""
    for part in sorted(parts - {*options.bias_places}):
        refuse_unless(False, f"{part} of {options.kind!r} has no bias that this conversion could add to")
    return options.with_biases(parts)


def check_places(options: SublayerConfig, parts: set[str], what: str) -> None:
    """Raises Refused if one of these linear maps has no place for a bias. `what` names the bias."""
    try:
        with_biases(options, parts)
    except Refused as refused:
        raise Refused(f"{what} has no place: {refused}") from refused


def with_all_biases(params: Params, *sublayers: str) -> Params:
    """The parameters with all biases of these dense feed-forward layers, which have either all or none. New ones are 0."""
    kernels = [path for path in params if path.split("/")[0] in sublayers and path.endswith("/kernel")]
    zero = {path.removesuffix("kernel") + "bias": np.zeros(params[path].shape[-1]) for path in kernels}
    return zero | params


def add_bias(params: Params, path: str, value: np.ndarray) -> None:
    """Adds `value` to the bias at `path`, in place; without one, it is the bias."""
    old = params.get(path)
    params[path] = value if old is None else old + value
