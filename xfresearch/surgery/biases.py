"""Where the linear maps that read a sublayer's input keep their biases."""

from dataclasses import replace

import numpy as np

from xfresearch.models.feed_forwards.dense import DenseConfig
from xfresearch.models.mixers.memory import wide_slots
from xfresearch.models.mixers.slots import SlotsConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.mixers.softmax.options import PROJECTIONS
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.surgery.network import Params
from xfresearch.surgery.refused import Refused, refuse_unless


def with_biases(options: SublayerConfig, names: set[str]) -> SublayerConfig:
    """`options` with biases on these linear maps. Raises Refused if one of them has no place for a bias."""
    if isinstance(options, DenseConfig):
        return replace(options, bias=True)
    places = {SoftmaxConfig: PROJECTIONS, SlotsConfig: ("query", "output")}.get(type(options), ())
    has = {*places, "memory"} if getattr(options, "memory_slots", 0) and wide_slots(options) else {*places}
    for name in sorted(names - has):
        refuse_unless(False, f"{name} of {options.kind!r} has no bias that this conversion could add to")
    given = set(options.bias) | names - {"memory"}
    return replace(options, bias=tuple(name for name in places if name in given))


def check_places(options: SublayerConfig, names: set[str], what: str) -> None:
    """Raises Refused if one of these linear maps has no place for a bias. `what` names the bias."""
    try:
        with_biases(options, names)
    except Refused as refused:
        raise Refused(f"{what} has no place: {refused}") from refused


def with_all_biases(params: Params, *sublayers: str) -> Params:
    """The parameters with all biases of these dense feed-forward layers, which have either all or none. New ones are 0."""
    kernels = [path for path in params if path.split("/")[0] in sublayers and path.endswith("/kernel")]
    zero = {path.removesuffix("kernel") + "bias": np.zeros(params[path].shape[-1]) for path in kernels}
    return zero | params


def add_bias(params: Params, path: str, value: np.ndarray) -> None:
    """Adds `value` to the bias of the linear map at `path`, such as 'attention/query', in place."""
    old = params.get(f"{path}/bias")
    params[f"{path}/bias"] = value if old is None else old + value
