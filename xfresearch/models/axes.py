"""What each parameter's dimensions mean: the one table that sharding, weight decay and Muon read.

A rule is (pattern of the parameter's path, letters of its dimensions, inputs, outputs): D width, H heads, G key-value
heads, K head size, M memory slots, F hidden, E experts, V vocabulary, L positions, R distances, U depth of a lambda.
Parameters with inputs and outputs are matrices (of a linear map, per remaining dimension). Stacked layers have one more
dimension in front, N.

CUTS says which mesh axes cut a dimension. Activations have the same letters, and B rows of the batch, S positions that
every device needs (keys and values).
"""

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    letters: str
    inputs: str = ""
    outputs: str = ""

    @property
    def matrix(self) -> bool:
        return bool(self.inputs)


BATCH = ("data", "fsdp", "expert")  # the axes that cut the batch by row


def row_parts(sizes) -> int:
    """Into how many parts a mesh of these sizes cuts the rows of a batch."""
    return math.prod(sizes[axis] for axis in BATCH)


# letter: (axes that cut it in a parameter, axes that cut it in an activation)
CUTS = {
    "B": ((), BATCH),
    "L": ((), ("context",)),
    "V": (("tensor",), ("tensor",)),
    "D": (("fsdp",), ()),
    "H": (("tensor",), ("tensor",)),
    "G": (("tensor",), ("tensor",)),
    "F": (("tensor",), ("tensor",)),
    "E": (("expert",), ()),
}
CUTS |= {letter: ((), ()) for letter in "NKMRUS"}  # never cut

TABLE = [
    (r"(embed|head)/table", Axes("VD")),
    (r"head_bias/bias", Axes("V")),
    (r"position/table", Axes("LD")),
    (r"embedding_scale|(.*/)?\w+/alpha|.*/(attention|feed_forward)_(skip_)?gain", Axes("")),
    (r".*/attention/value/(identity|weight)_gain", Axes("")),
    (r"shared/relative_key", Axes("RK")),
    (r"shared/relative_bias", Axes("RH")),
    (r"(embedding_norm|final_norm|.*/(attention|feed_forward)_norm_(in|out|post))/(gain|bias)", Axes("D")),
    (r".*/attention/(query|key)_norm/(gain|bias)", Axes("K")),
    (r".*/attention/query_norm/(gain|bias)", Axes("HK")),
    (r".*/attention/key_norm/(gain|bias)", Axes("GK")),
    (r".*/feed_forward/hidden_norm/(gain|bias)", Axes("F")),
    (r".*/attention/query/kernel", Axes("DHK", "D", "HK")),
    (r".*/attention/(key|value)/kernel", Axes("DGK", "D", "GK")),
    (r".*/attention/lambda_(key|value)/kernel", Axes("DUK", "D", "UK")),
    (r".*/attention/distances", Axes("RUK")),
    (r".*/attention/(query|value)_scaling/(gain|bias)", Axes("K")),
    (r".*/attention/output/kernel", Axes("HKD", "HK", "D")),
    (r".*/attention/query/bias", Axes("HK")),
    (r".*/attention/(key|value)/bias", Axes("GK")),
    (r".*/attention/memory/(key|value)", Axes("MGK", "M", "K")),
    (r".*/attention/memory/key", Axes("MD", "D", "M")),
    (r".*/attention/memory/value", Axes("MD", "M", "D")),
    (r".*/attention/memory/bias", Axes("M")),
    (r".*/attention/span/fraction|.*/attention/shaping/(identity|weights|uniform)", Axes("H")),
    (r".*/feed_forward/(shared/)?(up|gate)/kernel", Axes("DF", "D", "F")),
    (r".*/feed_forward/(shared/)?down/kernel", Axes("FD", "F", "D")),
    (r".*/feed_forward/(up|gate)/bias", Axes("F")),
    (r".*/(output|down)/bias", Axes("D")),
    (r".*/feed_forward/router/kernel", Axes("DE", "D", "E")),
    (r".*/feed_forward/router_bias", Axes("E")),
    (r".*/feed_forward/experts/(up|gate)", Axes("EDF", "D", "F")),
    (r".*/feed_forward/experts/down", Axes("EFD", "F", "D")),
]


# Where training moves a parameter back to after an update: (pattern of its path, least, largest).
BOUNDS = [(r".*/attention/span/fraction", 0.0, 1.0)]


def path_name(path) -> str:
    """A key path of jax.tree_util as 'blocks/main/attention/query/kernel'."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def axes_of(path: str, ndim: int) -> Axes:
    """The axes of the parameter at `path`, with N in front where it is stacked.

    Raises ValueError for a parameter that no rule of its rank names, or that two name.
    """
    stack = "N" if path.startswith("blocks/") else ""
    found = [axes for pattern, axes in TABLE if re.fullmatch(pattern, path) and len(stack + axes.letters) == ndim]
    if len(found) != 1:
        what = f"parameter {path} of {ndim} dimensions"
        raise ValueError(f"{what}: {len(found)} rules of models/axes.py match it, it must be one")
    return Axes(stack + found[0].letters, found[0].inputs, found[0].outputs)


def bounds_of(path: str) -> tuple[float, float] | None:
    """The least and largest value of the parameter at `path`, or None where it is free."""
    return next(((low, high) for pattern, low, high in BOUNDS if re.fullmatch(pattern, path)), None)


def tree_axes(params):
    """The tree of `params` with each array's Axes in its place."""
    import jax

    return jax.tree_util.tree_map_with_path(lambda path, leaf: axes_of(path_name(path), len(leaf.shape)), params)
