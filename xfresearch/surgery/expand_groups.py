"""expand_groups: every query head gets key-value heads of its own (multi-head attention from grouped queries).

    q_h k_g(h)^T, w_h v_g(h)        g(h) = floor(h G / H): the group of head h

Head h reads keys and values of its group alone, so H copies k'_h = k_g(h), v'_h = v_g(h) compute the same. Kernels,
biases and slots of the key-value heads are repeated. A norm of keys over all heads together reads the mean and the mean
square over the heads, which repeating each of them equally often does not change.

In differential attention group g has two keys and one value. Its queries are ordered by group and then by map, with one
head per group by head and then by map.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.mixers.differential import DifferentialConfig
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.groups import group_axes
from xfresearch.surgery.network import Network, Params, Target
from xfresearch.surgery.refused import refuse_unless


def convert(network: Network, layers, broken: bool = False) -> Network:
    axes = {}
    mixers = network.targets("mixer", layers)
    for each in mixers:
        a, where = each.options, each.where
        groups = getattr(a, "kv_heads", 0)
        refuse_unless(groups > 0, f"{where}: attention of kind {a.kind!r} has no key-value heads that query heads share")
        refuse_unless(groups < a.heads, f"{where}: each of the {a.heads} heads has keys and values of its own already")
        axes[each] = {} if isinstance(a, DifferentialConfig) else group_axes(network, each)

    def params(target: Target, old: Params) -> Params:
        a = target.options
        times = a.heads // a.kv_heads
        if isinstance(a, DifferentialConfig):
            return _differential(old, a.kv_heads, times, broken)
        repeated = {path: np.repeat(old[path], times, axis) for path, axis in axes[target].items()}
        for path, axis in axes[target].items() if broken else ():
            repeated[path][(slice(None),) * axis + (-1,)] = 0
        return old | repeated

    return network.change_each(mixers, lambda a: replace(a, kv_heads=a.heads), params)


def _differential(params: Params, groups: int, times: int, broken: bool) -> Params:
    """Queries [D, 2 H, K] and keys [D, 2 G, K] of differential attention with one head per group."""
    query, key, value_DGV = (params[f"{name}/kernel"] for name in ("query", "key", "value"))
    width, heads, size = query.shape
    query_DGmRK = query.reshape(width, groups, 2, times, size)
    key_DGmK = np.repeat(key.reshape(width, groups, 2, size), times, 1)
    new_query = query_DGmRK if broken else query_DGmRK.swapaxes(2, 3)
    return params | {
        "query/kernel": new_query.reshape(width, heads, size),
        "key/kernel": key_DGmK.reshape(width, heads, size),
        "value/kernel": np.repeat(value_DGV, times, 1),
    }


EXPAND_GROUPS = Conversion(
    name="expand_groups",
    about="grouped key-value heads become one for each head",
    conditions="query heads share key-value heads, which are matrices or slots and no parts of the input",
    broken="with the keys and values of the last head lost, or queries in their old order",
    convert=convert,
)
