"""The original transformer (Vaswani et al. 2017): an encoder and a decoder, post-norm, sinusoidal positions, ReLU, dropout.

vanilla_2017         base: width 512, 6 and 6 layers, 8 heads, hidden 2048, 37,000 shared tokens; 63.0 M parameters
vanilla_2017:base    the same
vanilla_2017:big     width 1024, 16 heads, hidden 4096; 214.2 M
vanilla_2017:tiny    runs in less than a minute on two cores

Table 3 of the paper says 65 M and 213 M. 44.1 M of base are layers, so 65 M have a table of 39,841 to 41,793 tokens, and
41,004 to 41,208 by the other rows for this size; biases of attention would add 0.04 M. The 213 M have 35,368 to 36,344. No
one vocabulary gives both, and these configs have the 37,000 tokens of section 5.1.

Pairs of the task `translation` stand for WMT, whose files data.corpus can name (docs/objectives.md).
"""

from xfresearch.configs.two_stacks import base, sized


def get_config(size: str = "base"):
    config, stacks = base(size, ("base", "big"))
    config.model.blocks.main.layout, stacks[0].blocks.main.layout = "cross_post_norm", "post_norm"
    for stack in stacks:
        stack.position, stack.embedding_scale, stack.final_norm = "sinusoidal", "sqrt_width", "none"
        stack.blocks.main.norm_bias = True
        stack.blocks.main.feed_forward.kind, stack.blocks.main.feed_forward.bias = "relu", True
    if size != "tiny":
        sized(config, *((512, 6, 8, 2048, 256) if size == "base" else (1024, 6, 16, 4096, 256)))
        config.data.bpe_vocab = config.model.vocab_size = 37_000
        for stack in stacks:
            stack.dropout = stack.blocks.main.dropout = 0.1 if size == "base" else 0.3
        config.optimizer.beta2 = 0.98
    return config
