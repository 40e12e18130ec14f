"""GPT-J (Wang & Komatsuzaki 2021): parallel sublayers after one norm, RoPE on a quarter of each head.

gptj         the published 6.05 B model
gptj:3m      about 3 M parameters on WikiText-2
gptj:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size)
    model, block = config.model, config.model.blocks.main
    block.layout, block.norm_bias = "parallel", True
    model.tie_embeddings, model.head_bias = False, True
    block.feed_forward.kind, block.feed_forward.bias = "gelu_tanh", True
    block.attention.position, block.attention.rope.fraction = "rope", 0.25
    if size == "full":
        model.width, model.depth, block.attention.heads = 4096, 28, 16
        model.vocab_size = config.data.bpe_vocab = 50_400
        config.sequence_length = 2048
    return config
