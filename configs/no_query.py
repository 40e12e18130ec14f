"""W_Q = I (Karbevski & Mijoski 2025): queries are slices of the normed residual stream; otherwise GPT-2 without biases.

no_query            12 layers of width 768: 77.9 M parameters without embeddings, 85.0 M with W_Q
no_query:matched    hidden size 4.5 times the width, which restores the parameter count
no_query:3m         about 3 M parameters on WikiText-2
no_query:tiny       runs in less than a minute on two cores

As published, logits are halved: scale = 1 / (2 sqrt(head_size)). The published arms also differ in weight decay (2^-5
against 0.1). Compare with `--config.model.blocks.main.attention.query=learned` at the same scale and decay.
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=("full", "matched", "3m", "tiny"))
    model, block = config.model, config.model.blocks.main
    model.position, block.attention.query = "learned", "identity"
    if size in ("full", "matched"):
        model.width, model.depth, block.attention.heads = 768, 12, 12
        config.sequence_length, config.optimizer.weight_decay = 1024, 2.0**-5
    if size in ("matched", "3m"):
        block.feed_forward.hidden_factor = 4.5
    block.attention.scale = 0.5 * (model.width / block.attention.heads) ** -0.5
    return config
