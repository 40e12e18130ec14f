"""One matrix per head in place of W_Q and W_K: logits x W_h x^T with W_h of size D x D and full rank.

merged_query         12 layers of width 768, 2 heads of size 384: as many parameters as with W_Q and W_K
merged_query:3m      about 3 M parameters on WikiText-2
merged_query:tiny    runs in less than a minute on two cores

`--config.model.blocks.main.attention.rank=R` limits the matrix to rank R; W_Q W_K^T has the rank of a head's size. With
heads of size m = D/2 both forms have equally many parameters (docs/models.md has the counts).
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size)
    model, block = config.model, config.model.blocks.main
    model.position, block.attention.query, block.attention.heads = "learned", "merged", 2
    if size == "full":
        model.width, model.depth = 768, 12
        config.sequence_length = 1024
    return config
