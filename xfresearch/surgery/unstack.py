"""unstack: layers that compute the identity are removed. It is the inverse of `stack`.

    x + h(norm(x)) W + b = x        if W = 0 and b = 0

All parameters that write the residual stream have to be exactly 0. Without --layers, all such layers are removed.
"""

from dataclasses import replace

from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.identity_layers import check_depth, identity_maps
from xfresearch.surgery.network import Network
from xfresearch.surgery.refused import Refused, refuse_unless


def convert(network: Network, layers, broken: bool = False) -> Network:
    count = len(network.layers)
    reasons = {number: _reason(network, number) for number in layers}
    removed = {number for number in layers if not reasons[number]}
    if len(layers) < count or not removed:
        refuse_unless(len(removed) == len(layers), next(filter(None, reasons.values()), ""))
    refuse_unless(len(removed) < count, "all layers compute the identity, and a model needs one")
    check_depth(network, first=min(removed) + 1)
    kept = [number for number in range(count) if number not in removed]
    if broken:  # the nearest other layer is removed, and the first identity is kept
        first = min(removed)
        nearest = min(kept, key=lambda number: abs(number - first))
        kept = sorted({*kept, first} - {nearest})
    return replace(
        network, layers=tuple(network.layers[old] for old in kept), params=lambda number: network.params(kept[number])
    )


def _reason(network: Network, number: int) -> str:
    """Why a layer is not the identity; '' if it is."""
    try:
        paths = identity_maps(network, number)
    except Refused as refused:
        return str(refused)
    found = network.params(number)
    return next((f"layer {number}: {path} is not 0" for path in paths if found[path].any()), "")


UNSTACK = Conversion(
    name="unstack",
    about="remove layers that compute the identity",
    conditions="all parameters of these layers that write the residual stream are 0; no other layer depends on the depth "
    "or on its number",
    broken="with another layer removed",
    convert=convert,
)
