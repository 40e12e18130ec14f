"""The memories of a layer as arrays: keys that inputs are compared with, and values that are written where they match.

A feed-forward layer is one (Geva et al. 2021): y = sum_i m_i v_i, with coefficients m_i = f(x . k_i + b_i). So is each
expert, and so are the persistent slots of attention, whose coefficients are weights of a softmax. The tap
`coefficients` of the same sublayer holds m.
"""

import jax

from xfresearch.errors import UserError
from xfresearch.models import layers, transformer
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.sublayer import Memory


def memory(model: ModelConfig, params: dict, layer: int, sublayer: str = "") -> Memory:
    """The memory of `layer` in its 'feed_forward' (all its experts), 'feed_forward.shared' (shared experts) or 'attention';
    by default that of the last sublayer that has one.

    UserError for a layer that there is not, or a sublayer without a memory.
    """
    at = layers.layer(model, layer)
    names = list(model.blocks[at.block].sublayers)
    block = jax.tree.map(lambda leaf: leaf[at.index], transformer.bind(model, params).blocks[at.stack])
    found = {
        f"{name}.{part}" if part else name: memory
        for name in names
        for part, memory in getattr(block, name).memories(model.param_dtype).items()
    }
    whole = [name for name in found if "." not in name]
    sublayer = sublayer or (whole[-1] if whole else names[-1])
    if sublayer not in found:
        have = ", ".join(found) or "none"
        raise UserError(f"layer {layer}: {sublayer!r} has no memory (those that have one: {have})")
    return found[sublayer]
