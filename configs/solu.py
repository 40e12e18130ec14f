"""SoLU (Elhage et al. 2022): x * softmax(x) and a LayerNorm in place of GELU; otherwise GPT-2.

solu         12 layers of width 768
solu:3m      about 3 M parameters on WikiText-2
solu:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size)
    model, block = config.model, config.model.blocks.main
    model.position, block.feed_forward.kind = "learned", "solu"
    block.norm_bias = block.feed_forward.bias = True
    block.attention.bias = ("query", "key", "value", "output")
    if size == "full":
        model.width, model.depth, block.attention.heads = 768, 12, 12
        config.sequence_length = 1024
    return config
