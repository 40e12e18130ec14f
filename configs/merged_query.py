"""One matrix per head in place of W_Q and W_K: logits x W_h x^T, W_h of size D x D and full rank.

configs/merged_query.py         12 layers of width 768 with 2 heads of size 384: as many parameters as the pair has
configs/merged_query.py:3m      about 3 M parameters on WikiText-2
configs/merged_query.py:tiny    trains in seconds on a CPU

`--config.model.blocks.main.attention.rank=R` constrains the matrix to rank R; the pair has the rank of a head's size.
A head of size m = D/2 makes both forms equal in parameters (docs/variants.md has the counts).
"""

from configs import common


def get_config(size: str = "full"):
    config = common.base(size)
    model, block = config.model, config.model.blocks.main
    model.position, block.attention.query, block.attention.heads = "learned", "merged", 2
    if size == "full":
        model.width, model.depth = 768, 12
        config.sequence_length = 1024
    return config
