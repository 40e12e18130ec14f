"""PaLM (Chowdhery et al. 2022): parallel sublayers after one norm, multi-query attention, RoPE, SwiGLU, no biases.

palm         the published 8.63 B model
palm:62b     62.50 B
palm:540b    540.35 B
palm:3m      about 3 M parameters on WikiText-2
palm:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common

SIZES = {"full": (4096, 32, 16), "62b": (8192, 64, 32), "540b": (18432, 118, 48)}  # width, depth, heads


def get_config(size: str = "full"):
    config = common.base(size, sizes=(*SIZES, "3m", "tiny"))
    model, block = config.model, config.model.blocks.main
    block.layout, block.attention.position, block.feed_forward.kind = "parallel", "rope", "swiglu"
    block.attention.kv_heads = 1
    if size in SIZES:
        model.width, model.depth, block.attention.heads = SIZES[size]
        block.attention.head_size = 256
        model.vocab_size = config.data.bpe_vocab = 256_000
        config.sequence_length = 2048
    if size == "3m":
        block.feed_forward.hidden = 832
    return config
