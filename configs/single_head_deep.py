"""Many thin layers of one head (Liu et al. 2021) in place of few wide layers of many heads, at equal matrix weights.

single_head_deep         144 layers of 1 head of size 64, hidden size 256, in place of GPT-2's 12 of 12 heads
single_head_deep:3m      16 layers of 1 head, in place of 4 layers of 4 heads, on WikiText-2
single_head_deep:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size)
    model, block = config.model, config.model.blocks.main
    model.position = "learned"
    if size == "full":
        model.width, model.depth, block.attention.heads = 768, 12, 12
        config.sequence_length = 1024
    heads = block.attention.heads
    block.attention.head_size, block.feed_forward.hidden = model.width // heads, 4 * model.width // heads
    model.depth, block.attention.heads = model.depth * heads, 1
    return config
