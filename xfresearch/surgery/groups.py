"""The parameters of attention that exist once for each key-value head, a group of query heads."""

import numpy as np

from xfresearch.models.mixers.memory import softmax_slots
from xfresearch.models.mixers.slots import SlotsConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.surgery.inverse import pseudo_inverse
from xfresearch.surgery.network import Network, Target, inside
from xfresearch.surgery.refused import refuse_unless

SPLIT = ("identity", "identity_plus")  # each key-value head is a part of the input


def group_axes(network: Network, target: Target) -> dict[str, int]:
    """{path: the place of the key-value heads among the dimensions}. Raises Refused if the heads are parts of the input,
    whose number is fixed by the width, or if there are none."""
    a, where = target.options, target.where
    known = isinstance(a, SoftmaxConfig) or (isinstance(a, SlotsConfig) and softmax_slots(a))
    refuse_unless(known, f"{where}: attention of kind {a.kind!r} has no key-value heads that query heads share")
    for name in ("key", "value"):
        kind = getattr(a, name, "learned")
        refuse_unless(
            kind not in SPLIT, f"{where}: {name}={kind!r} splits the input among kv_heads={a.kv_heads}: width / head_size"
        )
    whole_key = getattr(a, "key", "learned") == "identity_whole"
    found = {}
    for path, each in inside(network.axes(target.number), target.name).items():
        name = path.split("/")[0]
        once = name == "memory" and a.memory_heads == "shared"  # one set of slots for all key-value heads
        whole = name.startswith("key") and whole_key  # one key for all heads, the input itself
        if "G" in each.letters and not once and not whole:
            found[path] = each.letters.index("G")
    refuse_unless(bool(found), f"{where}: all heads read the same keys and values")
    return found


def group_of_heads(a: SoftmaxConfig) -> np.ndarray:
    """The group [H] of each head."""
    return np.arange(a.heads) // (a.heads // a.kv_heads)


def pseudo_inverses(kernel_DGK: np.ndarray, figures: dict[str, float], name: str) -> np.ndarray:
    """The pseudo-inverse [G, K, D] of the matrix of each group. `name` is that of the matrix in messages."""
    groups = enumerate(kernel_DGK.swapaxes(0, 1))
    return np.stack([pseudo_inverse(kernel_DK, figures, f"{name} of group {group}") for group, kernel_DK in groups])
