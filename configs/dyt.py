"""Dynamic tanh in place of every norm (Zhu et al. 2025): LLaMA with gain * tanh(alpha x) + bias, and a trained scale of
the embedding that starts at sqrt(width).

dyt         24 layers of width 1024; every alpha starts at 1, as in the paper at this width
dyt:3m      about 3 M parameters on WikiText-2
dyt:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size)
    model, block = config.model, config.model.blocks.main
    model.final_norm = block.norm = "dyt"
    model.embedding_scale, block.norm_bias, block.norm_alpha = "learned", True, 1.0
    block.attention.position, block.feed_forward.kind = "rope", "swiglu"
    block.feed_forward.gated_hidden = "matched"
    if size == "full":
        model.width, model.depth, block.attention.heads = 1024, 24, 16
        config.sequence_length = 2048
    return config
