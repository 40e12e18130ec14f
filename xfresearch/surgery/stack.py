"""stack: the model gets deeper by layers that compute the identity (Gong et al. 2019; Wu et al. 2024 with zeros).

    x + f(norm(x)) = x        if f(y) = h(y) W + b with W = 0 and b = 0

After each chosen layer there are copies of it whose last linear maps are 0: everything that writes the residual stream,
and the bias and the shift of a norm between. Training then starts at the function of the smaller model.

norm(x + 0) is not x, without a skip the output is 0 and not x, and heads in the stream have no last map: refused. So are
layers whose function depends on the depth (DeepNorm) or on their own number (lambda_0 of differential attention).
"""

from dataclasses import replace

import numpy as np

from xfresearch.surgery.conversion import Conversion, Option
from xfresearch.surgery.identity_layers import check_depth, identity_maps
from xfresearch.surgery.network import Network, Params
from xfresearch.surgery.refused import refuse_unless


def convert(network: Network, layers, broken: bool = False, copies: int = 1) -> Network:
    refuse_unless(copies >= 1, f"copies={copies} is below 1")
    check_depth(network, first=min(layers) + 1)
    zeros = {number: identity_maps(network, number) for number in layers}
    order = []  # of each new layer: the number of the old one, and what is 0
    for number in range(len(network.layers)):
        order += [(number, [])] + ([(number, zeros[number])] * copies if number in zeros else [])

    def params(number: int) -> Params:
        old, paths = order[number]
        found = network.params(old)
        return found if broken else found | {path: np.zeros_like(found[path]) for path in paths}

    return replace(network, layers=tuple(network.layers[old] for old, _ in order), params=params)


STACK = Conversion(
    name="stack",
    about="more layers, which compute the identity",
    conditions="the residual stream has a skip around every sublayer that writes it and no norm after the skip; no layer "
    "depends on the depth or on its number",
    broken="with the last maps of the copies kept",
    convert=convert,
    options={"copies": Option(1, "number of new layers after each layer")},
)
