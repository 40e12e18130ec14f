"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, GELU, biases, tied embeddings.

gpt2         124 M parameters, the published small model
gpt2:3m      about 3 M parameters on WikiText-2 as bytes
gpt2:5m      5 M parameters on WikiText-2
gpt2:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=(*common.SIZES, "5m"))
    model = config.model
    model.position, model.init = "learned", "normal"
    block = model.blocks.main
    block.feed_forward.kind = "gelu_tanh"
    block.norm_bias = block.feed_forward.bias = True
    block.attention.bias = ("query", "key", "value", "output")
    if size == "full":
        model.width, model.depth, block.attention.heads = 768, 12, 12
        model.vocab_size, config.data.bpe_vocab = 50257, 50257
        config.sequence_length = 1024
    if size == "5m":
        model.init = "fan_in"
        model.width, model.depth, block.attention.heads = 256, 6, 4
    return config
