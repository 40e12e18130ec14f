"""All-attention (Sukhbaatar et al. 2019): attention over the context and persistent slots, no feed-forward layer.

all_attention         18 layers of width 512, 1024 slots: the paper's small model, but with RoPE
all_attention:3m      about 3 M parameters on WikiText-2 as bytes
all_attention:5m      5 M parameters on WikiText-2
all_attention:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=(*common.SIZES, "5m"))
    model, block = config.model, config.model.blocks.main
    block.layout, block.attention.position = "all_attention", "rope"
    block.norm_bias = True
    model.final_norm = "none"  # every block ends in a norm
    block.attention.memory_slots = 32
    if size == "full":
        model.width, model.depth, block.attention.heads, block.attention.memory_slots = 512, 18, 8, 1024
        block.attention.dropout = 0.3
        config.sequence_length = 512
    if size == "3m":
        block.attention.memory_slots = 1024
    if size == "5m":
        model.width, model.depth, block.attention.heads, block.attention.memory_slots = 256, 6, 4, 1024
    return config
