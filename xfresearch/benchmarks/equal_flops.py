"""Configs of models that should take equally long, for `python -m xfresearch.bench update`: 6 layers of width 256.

:dense          SwiGLU layers of 1,024 hidden units
:experts        top-2 of 8 SwiGLU experts of 512: equal active FLOPs, except for the router's
:feed_forward   GELU layers of 1,024 units alone, as slots of the model's width
:slots          1,024 slots in the softmax of 4 heads, without matrices of queries and outputs: equal FLOPs
"""

from xfresearch.run_config.config_files import default_config
from xfresearch.runtime.errors import UserError

NAMES = ("dense", "experts", "feed_forward", "slots")


def get_config(name: str = "dense"):
    if name not in NAMES:
        raise UserError(f"there is no config {name!r} (allowed: {', '.join(NAMES)})")
    config = default_config()
    config.batch_size, config.sequence_length = 16, 256
    config.model.width, config.model.depth = 256, 6
    block = config.model.blocks.main
    block.norm = config.model.final_norm = "rms"
    block.attention.heads = 4
    if name in ("dense", "experts"):
        block.feed_forward.kind = "swiglu" if name == "dense" else "moe"
        block.feed_forward.hidden = 1024 if name == "dense" else 512
        return config
    block.layout, block.attention.kind, block.attention.memory_slots = "attention_only", "slots", 1024
    if name == "slots":
        block.attention.query = block.attention.output = "identity"
    else:
        block.attention.memory_activation = "gelu"
    return config
