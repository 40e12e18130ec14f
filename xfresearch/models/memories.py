"""The memories of a layer as arrays: keys that are compared with the input, and the values that they select.

A feed-forward layer is a memory (Geva et al. 2021): y = sum_i m_i v_i, with coefficients m_i = f(x . k_i + b_i). Each
expert is one, and so are the slots of attention, whose coefficients are softmax weights. The tap `coefficients` of the
same sublayer is m.
"""

from typing import Any

from xfresearch.models import transformer
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sublayer import Memory
from xfresearch.runtime.errors import UserError


def memory_of(model: ModelConfig, params: dict[str, Any], name: str) -> Memory:
    """The memory with this name, in either stack: 'blocks.0.feed_forward.shared', 'encoder.blocks.0.feed_forward'. Raises
    UserError if there is none."""
    for bound in transformer.bind(model, params).sublayers(has="memory_parts"):
        path = bound.sublayer.path
        if not f"{name}.".startswith(f"{path}."):
            continue
        for part, memory in bound.module.memories(model.param_dtype).items():
            if name == (f"{path}.{part}" if part else path):
                return memory
    raise UserError(f"{name!r} has no memory: it must be the path of a sublayer with one, such as 'blocks.0.feed_forward'")


def memory(model: ModelConfig, params: dict[str, Any], layer: int | str, sublayer: str = "") -> Memory:
    """The memory of a sublayer of `layer`: 'feed_forward' (all of its experts), 'feed_forward.shared' (shared experts)
    or 'attention'. By default it is that of the last sublayer with a memory. With a name in place of the layer, see
    memory_of.

    Raises UserError if the layer does not exist or the sublayer has no memory.
    """
    if isinstance(layer, str):
        return memory_of(model, params, layer)
    parts = {
        f"{bound.sublayer.name}.{part}" if part else bound.sublayer.name: memory
        for bound in transformer.bind(model, params).sublayers(has="memory_parts", layer=layer)
        for part, memory in bound.module.memories(model.param_dtype).items()
    }
    whole = [name for name in parts if "." not in name]
    last = model.sublayers(layer=layer)[-1].name
    sublayer = sublayer or (whole[-1] if whole else last)
    if sublayer not in parts:
        existing = ", ".join(parts) or "none"
        raise UserError(f"layer {layer}: {sublayer!r} has no memory (sublayers with a memory: {existing})")
    return parts[sublayer]
