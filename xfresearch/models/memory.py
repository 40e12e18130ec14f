"""The memories of a layer as arrays: keys that inputs are compared with, and values that are written where they match.

A feed-forward layer is one (Geva et al. 2021): y = sum_i m_i v_i, with coefficients m_i = f(x . k_i + b_i). So is each
expert, and so are the persistent slots of attention, whose coefficients are weights of a softmax. The tap
`coefficients` of the same sublayer holds m.
"""

from typing import NamedTuple

import jax

from xfresearch.config import ModelConfig
from xfresearch.errors import UserError
from xfresearch.models import transformer
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.sizes import wide_slots


class Memory(NamedTuple):
    """keys and values: [F, D] of a feed-forward, [E, F, D] of experts, [M, D] of slots of the model's width, [G, M, K] of
    slots in the softmax (in the space of each head's queries and values; G is 1 where they are shared).

    multipliers: of gated kinds, what the coefficient f(x . k_i) is multiplied with, as x . u_i; shaped like the keys."""

    keys: jax.Array
    values: jax.Array
    multipliers: jax.Array | None = None


def memory(model: ModelConfig, params: dict, layer: int, sublayer: str = "") -> Memory:
    """The memory of `layer` in its 'feed_forward' (all its experts), 'feed_forward.shared' (shared experts) or 'attention';
    by default the feed-forward's, where there is one.

    UserError for a layer that there is not, or a sublayer without a memory.
    """
    if not 0 <= layer < model.depth:
        raise UserError(f"layer {layer}: this model has layers 0 to {model.depth - 1}")
    repeat, place = divmod(layer, len(model.pattern))
    block, stack = model.blocks[model.pattern[place]], transformer.stack_names(model)[place]
    names = [s.name for s in LAYOUTS[block.layout].sublayers]
    has = [name for name in names if name == "feed_forward" or block.attention.memory_slots]
    sublayer = sublayer or (has[-1] if has else "feed_forward")
    if block.feed_forward.kind == "moe" and block.feed_forward.moe.shared and "feed_forward" in names:
        has.append("feed_forward.shared")
    if sublayer not in has:
        raise UserError(f"layer {layer}: {sublayer!r} has no memory (those that have one: {', '.join(has) or 'none'})")
    own = params["blocks"][stack]
    for part in sublayer.split("."):
        own = own[part]
    own = jax.tree.map(lambda leaf: leaf[repeat], own)
    if sublayer == "attention" and wide_slots(block.attention):
        return Memory(own["memory"]["key"], own["memory"]["value"])
    if sublayer == "attention":
        bound = transformer.bind(model, params).blocks[stack].attention
        slots = jax.tree.map(lambda leaf: leaf[repeat], bound).slots(model.param_dtype)
        return Memory(*(x_MGK.swapaxes(0, 1) for x_MGK in slots))
    kernels = own.get("experts") or {name: linear["kernel"] for name, linear in own.items() if "kernel" in linear}
    up, values = kernels["up"].swapaxes(-1, -2), kernels["down"]
    return Memory(kernels["gate"].swapaxes(-1, -2), values, up) if "gate" in kernels else Memory(up, values)
