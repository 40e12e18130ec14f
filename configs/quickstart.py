"""The quickstart: a small Llama-like model on Python's own source, trained in minutes on two cores.

quickstart         the model that `make train` trains
quickstart:tiny    runs in less than a minute on two cores
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=("full", "tiny"))
    model, block = config.model, config.model.blocks.main
    model.final_norm = block.norm = "rms"
    block.attention.position = "rope"
    block.feed_forward.kind = "swiglu"
    if size == "full":
        model.width, model.depth, block.attention.heads, block.feed_forward.hidden = 192, 4, 3, 512
        config.data.tokenizer, config.data.bpe_vocab = "bpe", 2048
        config.batch_size, config.sequence_length, config.steps = 16, 256, 340
        config.optimizer.kind, config.optimizer.learning_rate, config.optimizer.warmup = "muon", 1e-2, 20
        config.optimizer.schedule, config.optimizer.final_fraction = "linear", 0.0
        config.checkpoint.every = config.evaluation.every = 100
        config.evaluation.sequences = 64
        config.log.sample = "class Queue:\n    def __init__(self"
    return config
