"""Mixtral 8x7B (Jiang et al. 2024): LLaMA with grouped-query attention and two of eight experts per token.

mixtral_8x7b          the published model, 46.7 B parameters, 12.9 B of them active
mixtral_8x7b:small    the same proportions at 0.2 B, for one device
mixtral_8x7b:3m       about 3 M parameters on WikiText-2
mixtral_8x7b:tiny     runs in less than a minute on two cores
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=("full", "small", "3m", "tiny"))
    model, block = config.model, config.model.blocks.main
    model.final_norm = block.norm = "rms"
    model.tie_embeddings = False
    block.norm_cast = "before_gain"
    block.attention.position, block.attention.rope.theta = "rope", 1e6
    block.feed_forward.kind = "moe"
    if size in ("full", "small"):
        model.width, model.depth, block.attention.heads = (4096, 32, 32) if size == "full" else (512, 8, 8)
        block.attention.kv_heads = block.attention.heads // 4
        block.feed_forward.hidden = model.width * 7 // 2
        config.sequence_length = 4096 if size == "full" else 1024
    if size == "full":  # as in docs/plan.md
        config.batch_size, config.training.remat = 1024, "full"
        config.mesh.data, config.mesh.fsdp = 1, -1
    if size == "3m":
        block.attention.kv_heads, block.feed_forward.hidden = 2, 96
    if size == "tiny":
        block.attention.kv_heads, block.feed_forward.hidden = 2, 32
    return config
