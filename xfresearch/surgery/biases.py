"""Biases of linear maps: conversions add to them, or make them."""

import numpy as np

from xfresearch.models.linear_terms import LinearTerm
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.surgery.network import Params
from xfresearch.surgery.refused import Refused


def with_biases(options: SublayerConfig, parts: set[str]) -> SublayerConfig:
    """`options` with biases on these linear maps. Raises Refused if one of them has no place for a bias."""
    for part in sorted(parts - {*options.bias_places}):
        raise Refused(f"{part} of {options.kind!r} has no bias that this conversion could add to")
    return options.with_biases(parts)


def check_places(options: SublayerConfig, parts: set[str], what: str) -> None:
    """Raises Refused if one of these linear maps has no place for a bias. `what` names the bias."""
    try:
        with_biases(options, parts)
    except Refused as refused:
        raise Refused(f"{what} has no place: {refused}") from refused


def with_all_biases(params: Params, terms: list[LinearTerm]) -> Params:
    """The parameters with biases on all linear terms of feed-forward layers, because an option switches all of them on
    together. New biases are 0, for experts [E, F] or [E, D]."""
    kernels = {term.bias: params[term.kernel] for term in terms if term.bias}
    return {path: np.zeros((*kernel.shape[:-2], kernel.shape[-1])) for path, kernel in kernels.items()} | params


def add_bias(params: Params, path: str, value: np.ndarray) -> None:
    """Adds `value` to the bias at `path`, in place. If there is no bias, `value` becomes the bias."""
    old = params.get(path)
    params[path] = value if old is None else old + value
