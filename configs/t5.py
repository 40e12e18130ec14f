"""T5 (Raffel et al. 2020): an encoder and a decoder, pre-norm with RMSNorm, relative biases shared by the layers of a stack.

t5                small: width 512, 6 and 6 layers, ReLU, 32,128 tokens; 60.5 M parameters
t5:small          the same
t5:v1_1_small     v1.1 small: 8 and 8 layers of 6 heads, gated GELU, an output head of its own; 77.0 M
t5:tiny           runs in less than a minute on two cores
t5:v1_1_tiny      the same of v1.1

Logits of attention are not scaled. v1.0 multiplies what the head reads by width^-1/2; its initial embeddings have standard
deviation 1. Span corruption (docs/objectives.md) is its objective:
--config.data.objective.kind=span_corruption with a corpus of text.
"""

from xfresearch.configs.two_stacks import attentions, base, sized


def get_config(size: str = "small"):
    config, stacks = base(size, ("small", "v1_1_small"), ("tiny", "v1_1_tiny"))
    first = size in ("small", "tiny")  # v1.0
    for stack in stacks:
        block = stack.blocks.main
        stack.final_norm = block.norm = "rms"
        block.norm_epsilon, block.attention.position = 1e-6, "t5"
        block.feed_forward.kind = "relu" if first else "geglu_tanh"
    if size in ("small", "v1_1_small"):
        config.model.vocab_size = 32_128
        sized(config, 512, *((6, 8, 2048) if first else (8, 6, 1024)), 512)
        config.sequence_length = 128
        for attention in attentions(config):
            attention.head_size = 64
        for stack in stacks:
            stack.dropout = stack.blocks.main.dropout = 0.1
    config.model.tie_embeddings = first
    if first:
        config.model.head_scale, config.model.embedding_std = "inverse_sqrt_width", 1.0
    for attention in attentions(config):
        attention.scale = 1.0
    return config
