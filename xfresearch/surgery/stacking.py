"""stack and unstack: layers that compute the identity are added (Gong et al. 2019; Wu et al. 2024 with zeros) or removed.

    x + f(norm(x)) = x        if f(y) = h(y) W + b with W = 0 and b = 0

After each chosen layer `stack` adds copies of it whose last linear maps are 0: everything that writes the residual stream,
and the bias and the shift of a norm between. Training then starts at the function of the smaller model.

`unstack` is the inverse. All parameters that write the residual stream have to be exactly 0. Without --layers, all such
layers are removed.

norm(x + 0) is not x, without a skip the output is 0 and not x, and heads in the stream have no last map: refused. So are
layers whose function depends on the depth (DeepNorm) or on their own number (lambda_0 of differential attention), and
`unstack` of a layer whose values later layers read (value residuals).
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.kinds import kind_of
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.norms import WITH_EPSILON
from xfresearch.surgery.network import Network, Params
from xfresearch.surgery.refused import Refused, refuse_unless
from xfresearch.surgery.registry import conversion
from xfresearch.surgery.stream_maps import last_maps


@conversion(
    "more layers, which compute the identity",
    conditions="the residual stream has a skip around every sublayer that writes it and no norm after the skip; no layer "
    "depends on the depth or on its number",
    broken="with the last maps of the copies kept",
    options={"copies": "number of new layers after each layer"},
)
def stack(network: Network, layers, broken: bool = False, copies: int = 1) -> Network:
    refuse_unless(copies >= 1, f"copies={copies} is below 1")
    check_depth(network, first=min(layers) + 1)
    zeros = {number: identity_maps(network, number) for number in layers}
    order: list = []  # of each new layer: the number of the old one, and what is 0
    for number in range(len(network.layers)):
        order += [(number, [])] + ([(number, zeros[number])] * copies if number in zeros else [])

    def params(number: int) -> Params:
        old, paths = order[number]
        arrays = network.params(old)
        return arrays if broken else arrays | {path: np.zeros_like(arrays[path]) for path in paths}

    return replace(network, layers=tuple(network.layers[old] for old, _ in order), params=params)


@conversion(
    "remove layers that compute the identity",
    conditions="all parameters of these layers that write the residual stream are 0; no other layer depends on the depth "
    "or on its number",
    broken="with another layer removed",
)
def unstack(network: Network, layers, broken: bool = False) -> Network:
    count = len(network.layers)
    reasons = {number: _reason(network, number) for number in layers}
    removed = {number for number in layers if not reasons[number]}
    if len(layers) < count or not removed:
        refuse_unless(len(removed) == len(layers), next(filter(None, reasons.values()), ""))
    refuse_unless(len(removed) < count, "all layers compute the identity, and a model needs one")
    check_depth(network, first=min(removed) + 1)
    _check_carried(network, removed)
    kept = [number for number in range(count) if number not in removed]
    if broken:  # the nearest other layer is removed, and the first identity is kept
        first = min(removed)
        nearest = min(kept, key=lambda number: abs(number - first))
        kept = sorted({*kept, first} - {nearest})
    return replace(
        network, layers=tuple(network.layers[old] for old in kept), params=lambda number: network.params(kept[number])
    )


def _check_carried(network: Network, removed: set[int]) -> None:
    """Raises Refused if a layer that stays reads a value that one of the removed layers makes (Zhou et al. 2024)."""
    makers: dict[str, int] = {}  # the first layer with each of the values that travel
    own = [each for each in network.resolved.sublayers() if each.prefix == network.resolved.prefix]
    for each in own:
        number = each.layer.number
        for name in kind_of(each.options).module.carried(each.place):
            maker = makers.setdefault(name, number)
            refuse_unless(
                maker not in removed or number in removed, f"layer {maker}: {each.path} reads the {name} of this layer"
            )


def _reason(network: Network, number: int) -> str:
    """Why a layer is not the identity; '' if it is."""
    try:
        paths = identity_maps(network, number)
    except Refused as refused:
        return str(refused)
    arrays = network.params(number)
    return next((f"layer {number}: {path} is not 0" for path in paths if arrays[path].any()), "")


def identity_maps(network: Network, number: int) -> list[str]:
    """Paths of the parameters of a layer that make it the identity if all of them are 0. Raises Refused if none do."""
    block, axes, where = network.layers[number].block, network.axes(number), f"layer {number}"
    maps: list[str] = []
    replaced = ""  # the sublayer whose output has replaced the input of the block
    for branch in LAYOUTS[block.layout].branches:
        name = branch.name
        post = f"{name}_post"
        refuse_unless(
            "post" not in branch.norms or block.norm_at(post).kind == "none",
            f"{where}: norms.{post} reads the skip too, and norm(x + 0) is not x",
        )
        refuse_unless(
            not (replaced and branch.connection.adds_to == "stream"),
            f"{where}: layout={block.layout!r} has no skip around {replaced}: x is not added to its output",
        )
        refuse_unless(
            branch.connection.adds_to != "mixture",
            f"{where}: layout={block.layout!r} mixes {branch.connection.mixes}, also where {name} writes 0",
        )
        replaced = name if branch.connection.adds_to == "nothing" else ""
        if branch.connection.adds_to != "nothing":
            maps += last_maps(network, number, name) + _output_norm(block, name, axes, where)
    refuse_unless(
        not replaced, f"{where}: layout={block.layout!r} has no skip around {replaced}: x is not added to its output"
    )
    return maps


def _output_norm(block: BlockConfig, name: str, axes: dict, where: str) -> list[str]:
    """Paths of the parameters that make the norm of an output of 0 differ from 0: its bias, and the shift of derf."""
    site = f"{name}_out"
    if not hasattr(block.norms, site):
        return []
    spec = block.norm_at(site)
    refuse_unless(
        spec.epsilon > 0 or spec.kind not in WITH_EPSILON, f"{where}: norms.{site} without epsilon divides 0 by 0"
    )
    return [path for part in ("bias", "shift") if (path := f"{name}_norm_out/{part}") in axes]


def check_depth(network: Network, first: int) -> None:
    """Raises Refused if a layer depends on the depth, or one from `first` on depends on its number."""
    for number, at in enumerate(network.layers):
        refuse_unless(
            not any(callable(branch.connection.skip.value) for branch in LAYOUTS[at.block.layout].branches),
            f"layer {number}: the factor (2 depth)^(1/4) of the skip in layout={at.block.layout!r} depends on the depth",
        )
        refuse_unless(
            number < first or not any(each.numbered for each in at.block.sublayers.values()),
            f"layer {number}: lambda_0 = 0.8 - 0.6 exp(-0.3 l) of differential attention depends on the layer's number l",
        )
