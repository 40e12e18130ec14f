"""Causal lambda layers in place of attention (Bello 2021, LambdaNetworks): pre-norm, GELU, linear in the length.

lambda_lm         84 M parameters: GPT-2's width, depth and heads, without its attention matrices
lambda_lm:3m      about 3 M parameters on WikiText-2
lambda_lm:tiny    runs in less than a minute on two cores

The position lambdas, within their window, are the only position information.
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size)
    model, block = config.model, config.model.blocks.main
    block.attention.kind = "lambda"
    if size == "full":
        model.width, model.depth, block.attention.heads = 768, 12, 12
        config.sequence_length = 1024
    if size == "3m":
        model.depth, block.feed_forward.hidden = 5, 1152
    if size == "tiny":
        block.attention.lambdas.key_size, block.attention.lambdas.window = 8, 5
    return config
