"""The Majority task of Brody et al. 2023: one layer of width 8 predicts the most frequent class of a sequence.

brody_majority                 LayerNorm without gain and bias before attention, as published
brody_majority:scale           only the scaling of LayerNorm, x / rms(x)
brody_majority:project         only its projection, x - mean(x)
brody_majority:tiny            an easier task and a wider model, runs in less than a minute on two cores

The arms differ only in this norm. In the published code the scaling arm also divides its inputs by 8. docs/playground.md
has the task and the results.
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=("full", "scale", "project", "tiny"))
    model, block = config.model, config.model.blocks.main
    model.causal, model.final_norm, model.dtype = False, "none", "float32"
    block.norm_bias, block.norm_epsilon = True, 0.0
    block.norms.attention_in.gain = block.norms.attention_in.bias = False
    block.feed_forward.kind, block.feed_forward.bias, block.attention.bias = "relu", True, ("output",)
    config.data.tokenizer = "bytes"
    if size == "tiny":
        config.data.corpus, config.sequence_length = ("majority:classes=8,samples=600,margin=4",), 24
        config.batch_size, config.steps = 64, 60
        return config
    config.data.corpus, config.sequence_length, config.batch_size = ("majority",), 50, 6000
    model.width, model.depth, block.attention.heads, block.feed_forward.hidden = 8, 1, 1, 8
    model.embedding_std = 1.0
    block.norms.attention_in.kind = "layer" if size == "full" else size
    config.steps, optimizer = 14_000, config.optimizer  # 1,000 epochs
    optimizer.learning_rate, optimizer.weight_decay, optimizer.beta2, optimizer.clip = 1e-3, 0.0, 0.999, 0.0
    optimizer.schedule, optimizer.warmup, optimizer.final_fraction = "linear", 0, 0.9  # to 0 after 10,000 epochs
    config.evaluation.every, config.evaluation.sequences, config.checkpoint.every = 100, 0, 500
    return config
