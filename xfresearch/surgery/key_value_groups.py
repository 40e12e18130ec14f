"""expand_groups and pool_groups: the number of key-value heads, each of which a group of query heads shares.

`expand_groups` gives every query head a key-value head of its own (multi-head attention from grouped queries):

    q_h k_g(h)^T, w_h v_g(h)        g(h) = floor(h G / H): the group of head h

Head h reads keys and values of its group alone, so H copies k'_h = k_g(h), v'_h = v_g(h) compute the same. Kernels,
biases and slots of the key-value heads are repeated. A norm of keys over all heads together reads the mean and the mean
square over the heads, which repeating each of them equally often does not change.

A value residual mixes values with those of the first layer, head by head: all layers that share them change together.

In differential attention group g has two keys and one value. Its queries are ordered by group and then by map, with one
head per group by head and then by map.

`pool_groups` makes fewer key-value heads, each the mean of those that it replaces (Ainslie et al. 2023, sec. 2.1):

    W_K,g' = mean of W_K,g over the G / G' groups g that become g'        likewise W_V, biases, slots

This is exact only if the groups of a mean are equal, as after expand_groups. Otherwise it is an approximation, a start
for more training, and the certificate tells how far the logits are. The mean of the stored kernels is that of the keys and
values, but a norm of keys, and the gain of one over all heads, act on the mean and not on each key.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.mixers.differential import DifferentialConfig
from xfresearch.models.mixers.memory_slots import softmax_slots
from xfresearch.models.mixers.slots import SlotsConfig
from xfresearch.models.mixers.softmax.config import Attending
from xfresearch.models.mixers.value_residual import ValueResidualConfig
from xfresearch.surgery.inverse import pseudo_inverse
from xfresearch.surgery.network import ATTENDING, Network, Params, Target, inside
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion

SPLIT = ("identity", "identity_plus")  # each key-value head is a part of the input


def group_axes(network: Network, target: Target) -> dict[str, int]:
    """{path: the place of the key-value heads among the dimensions}. Raises Refused if the heads are parts of the input,
    whose number is fixed by the width, or if there are none."""
    a, where = target.options, target.where
    known = isinstance(a, Attending | ValueResidualConfig) or (isinstance(a, SlotsConfig) and softmax_slots(a) > 0)
    refuse_unless(known, f"{where}: attention of kind {a.kind!r} has no key-value heads that query heads share")
    for name in ("key", "value"):
        kind = getattr(a, name, "learned")
        refuse_unless(
            kind not in SPLIT, f"{where}: {name}={kind!r} splits the input among kv_heads={a.kv_heads}: width / head_size"
        )
    whole_key = getattr(a, "key", "learned") == "identity_whole"
    axes = {}
    for path, each in inside(network.axes(target.number), target.name).items():
        name = path.split("/")[0]
        once = name == "memory" and a.memory_heads == "shared"  # one set of slots for all key-value heads
        whole = name.startswith("key") and whole_key  # one key for all heads, the input itself
        if "G" in each.letters and not once and not whole:
            axes[path] = each.letters.index("G")
    refuse_unless(bool(axes), f"{where}: all heads read the same keys and values")
    return axes


def group_of_heads(a: Attending) -> np.ndarray:
    """The group [H] of each head."""
    return np.arange(a.heads) // (a.heads // a.kv_heads)


def pseudo_inverses(kernel_DGK: np.ndarray, figures: dict[str, float], name: str) -> np.ndarray:
    """The pseudo-inverse [G, K, D] of the matrix of each group. `name` is that of the matrix in messages."""
    groups = enumerate(kernel_DGK.swapaxes(0, 1))
    return np.stack([pseudo_inverse(kernel_DK, figures, f"{name} of group {group}") for group, kernel_DK in groups])


@conversion(
    "grouped key-value heads become one for each head",
    conditions="query heads share key-value heads, which are matrices or slots and no parts of the input",
    broken="with the keys and values of the last head lost, or queries in their old order",
    roles=ATTENDING,
)
def expand_groups(network: Network, mixers: list[Target], broken: bool = False) -> Network:
    axes = {}
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

    return network.change_each(mixers, lambda each: replace(each.options, kv_heads=each.options.heads), params)


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


@conversion(
    "fewer key-value heads, each the mean of those that it replaces",
    conditions="the key-value heads of a mean are equal; otherwise it is an approximation",
    broken="with the first head of each mean",
    roles=ATTENDING,
    approximate=True,
    options={"kv_heads": "number of key-value heads afterwards"},
)
def pool_groups(network: Network, mixers: list[Target], broken: bool = False, kv_heads: int = 1) -> Network:
    axes = {}
    for each in mixers:
        axes[each] = group_axes(network, each)
        groups = each.options.kv_heads
        refuse_unless(
            1 <= kv_heads < groups and groups % kv_heads == 0,
            f"{each.where}: kv_heads={kv_heads} is not a smaller divisor of its {groups} key-value heads",
        )
    return network.change_each(
        mixers,
        lambda each: replace(each.options, kv_heads=kv_heads),
        lambda each, old: old | {path: _pooled(old[path], axis, kv_heads, broken) for path, axis in axes[each].items()},
    )


def _pooled(array: np.ndarray, axis: int, groups: int, broken: bool) -> np.ndarray:
    """The means of neighbours along `axis`, `groups` of them; with `broken`, the first one of each."""
    shape = array.shape
    parts = array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    return parts.take(0, axis + 1) if broken else parts.mean(axis + 1)
