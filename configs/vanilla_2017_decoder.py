"""The decoder of the original transformer (Vaswani et al. 2017): post-norm, sinusoidal positions, ReLU, dropout.

vanilla_2017_decoder         the base model's sizes: width 512, 6 layers, 8 heads, hidden 2048, 37,000 shared tokens
vanilla_2017_decoder:big     width 1024, 16 heads, hidden 4096
vanilla_2017_decoder:3m      about 3 M parameters on WikiText-2
vanilla_2017_decoder:tiny    runs in less than a minute on two cores

A language model, which has no encoder: `vanilla_2017` is the whole model.
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=("full", "big", "3m", "tiny"))
    model, block = config.model, config.model.blocks.main
    model.position, model.embedding_scale, model.final_norm = "sinusoidal", "sqrt_width", "none"
    block.layout, block.norm_bias = "post_norm", True
    block.feed_forward.kind, block.feed_forward.bias = "relu", True
    if size in ("full", "big"):
        model.width, model.depth, block.attention.heads = (512, 6, 8) if size == "full" else (1024, 6, 16)
        config.data.bpe_vocab = model.vocab_size = 37_000
        model.dropout = block.dropout = 0.1 if size == "full" else 0.3
    return config
