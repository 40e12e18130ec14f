"""The model of Brody et al. 2023 for the Majority task: one layer of width 8, one head, a hidden size of 8, no positions.

configs/brody_majority.py                 LayerNorm without gain and bias before attention, as published
configs/brody_majority.py:scale           scaling alone there; :project is projection alone
configs/brody_majority.py:3m              the same arrangement at about 3 M parameters on WikiText-2
configs/brody_majority.py:tiny            trains in seconds on a CPU

The arms differ in that norm and in nothing else: the published code makes inputs of its scaling arm 8 times smaller. The
settings of the run (batch, schedule, text) are ours.
"""

from configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=("full", "scale", "project", "3m", "tiny"))
    model, block = config.model, config.model.blocks.main
    model.final_norm, block.norm_bias, block.norm_bare = "none", True, ("attention_in",)
    block.norm_epsilon = 0.0
    block.feed_forward.kind, block.feed_forward.bias = "relu", True
    if size in ("full", "scale", "project"):
        model.width, model.depth, block.attention.heads, block.feed_forward.hidden = 8, 1, 1, 8
        model.embedding_std = 1.0
        block.norms.attention_in = "layer" if size == "full" else size
        config.data.tokenizer, config.batch_size, config.sequence_length = "bytes", 120, 50
        config.optimizer.learning_rate, config.optimizer.weight_decay = 1e-3, 0.0
    return config
