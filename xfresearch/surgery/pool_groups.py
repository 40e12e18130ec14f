"""pool_groups: fewer key-value heads, each the mean of those that it replaces (Ainslie et al. 2023, sec. 2.1).

    W_K,g' = mean of W_K,g over the G / G' groups g that become g'        likewise W_V, biases, slots

This is exact only if the groups of a mean are equal, as after expand_groups. Otherwise it is an approximation, a start
for more training, and the certificate tells how far the logits are. The mean of the stored kernels is that of the keys and
values, but a norm of keys, and the gain of one over all heads, act on the mean and not on each key.
"""

from dataclasses import replace

import numpy as np

from xfresearch.surgery.conversion import Conversion, Option
from xfresearch.surgery.groups import group_axes
from xfresearch.surgery.network import Network
from xfresearch.surgery.refused import refuse_unless


def convert(network: Network, layers, broken: bool = False, kv_heads: int = 1) -> Network:
    axes = {}
    mixers = network.targets("mixer", layers)
    for each in mixers:
        axes[each] = group_axes(network, each)
        groups = each.options.kv_heads
        refuse_unless(
            1 <= kv_heads < groups and groups % kv_heads == 0,
            f"{each.where}: kv_heads={kv_heads} is not a smaller divisor of its {groups} key-value heads",
        )
    return network.change_each(
        mixers,
        lambda a: replace(a, kv_heads=kv_heads),
        lambda each, old: old | {path: _pooled(old[path], axis, kv_heads, broken) for path, axis in axes[each].items()},
    )


def _pooled(array: np.ndarray, axis: int, groups: int, broken: bool) -> np.ndarray:
    """The means of neighbours along `axis`, `groups` of them; with `broken`, the first one of each."""
    shape = array.shape
    parts = array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])
    return parts.take(0, axis + 1) if broken else parts.mean(axis + 1)


POOL_GROUPS = Conversion(
    name="pool_groups",
    about="fewer key-value heads, each the mean of those that it replaces",
    conditions="the key-value heads of a mean are equal; otherwise it is an approximation",
    broken="with the first head of each mean",
    convert=convert,
    approximate=True,
    options={"kv_heads": Option(1, "number of key-value heads afterwards")},
)
