"""BART (Lewis et al. 2020): an encoder and a decoder, post-norm, learned positions, GELU, biases everywhere.

bart          base: width 768, 6 and 6 layers, 12 heads, hidden 3072, 50,265 tokens; 139 M parameters
bart:base     the same
bart:tiny     runs in less than a minute on two cores

Positions begin at row 2 of their tables. The embedding has a norm, and the stacks end without one.
"""

from xfresearch.configs.two_stacks import attentions, base, sized


def get_config(size: str = "base"):
    config, stacks = base(size, ("base",))
    config.model.blocks.main.layout, stacks[0].blocks.main.layout = "cross_post_norm", "post_norm"
    for stack in stacks:
        block = stack.blocks.main
        stack.position, stack.position_offset, stack.embedding_norm, stack.final_norm = "learned", 2, "layer", "none"
        block.norm_bias, block.feed_forward.kind, block.feed_forward.bias = True, "gelu", True
    for attention in attentions(config):
        attention.bias = ("query", "key", "value", "output")
    if size != "tiny":
        sized(config, 768, 6, 12, 3072, 1024)
        config.model.vocab_size = 50_265
        for stack in stacks:
            stack.dropout = stack.blocks.main.dropout = 0.1
    return config
