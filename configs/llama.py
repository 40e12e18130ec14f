"""LLaMA (Touvron et al. 2023): pre-norm RMSNorm, RoPE, SwiGLU, no biases, untied.

llama         the published 6.7 B model
llama:13b     13.0 B; also 33b (32.5 B), 65b (65.2 B)
llama:70b     the largest Llama 2 (Touvron et al. 2023b), 69.0 B: 8 key-value heads, sequences of 4096
llama:3m      about 3 M parameters on WikiText-2
llama:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common

# width, depth, heads, hidden
SIZES = {
    "full": (4096, 32, 32, 11008),
    "13b": (5120, 40, 40, 13824),
    "33b": (6656, 60, 52, 17920),
    "65b": (8192, 80, 64, 22016),
    "70b": (8192, 80, 64, 28672),
}


def get_config(size: str = "full"):
    config = common.base(size, sizes=(*SIZES, "3m", "tiny"))
    model, block = config.model, config.model.blocks.main
    model.final_norm = block.norm = "rms"
    model.tie_embeddings = False
    block.attention.position, block.feed_forward.kind = "rope", "swiglu"
    block.norm_cast, block.norm_epsilon = "before_gain", 1e-6
    if size in SIZES:
        model.width, model.depth, block.attention.heads, block.feed_forward.hidden = SIZES[size]
        config.sequence_length = 2048
        if size == "70b":
            block.attention.kv_heads, block.norm_epsilon, config.sequence_length = 8, 1e-5, 4096
    else:
        block.feed_forward.gated_hidden = "matched"
    return config
