"""Sparse mixture of experts as in Mixtral (Jiang et al. 2024): RMSNorm, RoPE, SwiGLU experts, top-2 of 8, dropless.

moe         0.5 B parameters, 0.2 B of them active
moe:3m      about 3 M parameters on WikiText-2 as bytes
moe:5m      5 M parameters on WikiText-2
moe:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=(*common.SIZES, "5m"))
    model, block = config.model, config.model.blocks.main
    model.final_norm = block.norm = "rms"
    block.attention.position = "rope"
    block.feed_forward.kind = "moe"
    if size == "full":
        model.width, model.depth, block.attention.heads, block.attention.kv_heads = 1024, 16, 16, 4
        block.feed_forward.hidden = 1024
        model.tie_embeddings = False
        config.sequence_length = 1024
    if size == "3m":
        block.feed_forward.hidden = 96
    if size == "5m":
        model.width, model.depth, block.attention.heads = 192, 5, 4
        block.feed_forward.hidden = 192
    if size == "tiny":
        block.feed_forward.hidden = 32
    return config
