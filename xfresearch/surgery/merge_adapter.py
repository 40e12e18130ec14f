"""merge_adapter: every matrix takes up the product of its adapter.

    x (W + s A B) = x W'        W' = W + s A B

The product is computed in float64, and W' is saved in the dtype of the parameters, float32 or wider.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.adapters import ENDING, NoAdapter, dimensions
from xfresearch.options.fields import with_values
from xfresearch.surgery.conversion import MERGE
from xfresearch.surgery.network import Network, Params
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion


@conversion(
    "add the adapters to the matrices beside them",
    conditions="the model has adapters, in all layers of all stacks at once",
    broken="with adapters of twice the scale",
    name=MERGE,
)
def merge_adapter(network: Network, layers, broken: bool = False) -> Network:
    options = network.model.adapter
    refuse_unless(options.kind != "none", "the model has no adapter")
    scale = options.scale * (2.0 if broken else 1.0)

    def params(number: int) -> Params:
        old, new = network.params(number), {}
        for path, axes in network.axes(number).items():
            if f"{ENDING}/" in path:
                continue
            new[path] = old[path]
            if f"{path}{ENDING}/a" in old:
                factors = (old[f"{path}{ENDING}/{name}"] for name in "ab")
                new[path] = old[path] + scale * np.einsum(dimensions(axes).equation, *factors, optimize=True)
        return new

    return replace(network, model=with_values(network.model, {"adapter": NoAdapter()}), params=params)
