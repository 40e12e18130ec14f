"""An encoder and a decoder, and a run of some minutes on two cores, for the tasks with generated pairs."""

from xfresearch.configs import common
from xfresearch.run_config.config_files import default_encoder


def pairs(size: str, task: str):
    """The config of a task. Raises UserError for an unknown size."""
    config = common.base(size, sizes=("full", "tiny"))
    encoder, model = default_encoder(), config.model
    model.stacks = {"encoder": encoder}
    model.blocks.main.layout, model.dtype = "cross_pre_norm", "float32"
    model.width, model.depth = (128, 2) if size == "full" else (32, 2)
    encoder.depth = model.depth
    model.position = encoder.position = "learned"
    for block in (model.blocks.main, encoder.blocks.main):
        block.attention.heads = 4
    model.blocks.main.cross_attention.heads = 4
    config.data.corpus, config.data.objective.kind, config.data.tokenizer = (task,), "seq2seq", "bytes"
    config.source_length = config.sequence_length = 64
    if size == "full":
        config.batch_size, config.steps, config.optimizer.warmup = 32, 1500, 100
        config.optimizer.learning_rate, config.optimizer.weight_decay = 2e-3, 0.01
        config.optimizer.schedule, config.optimizer.final_fraction = "linear", 0.0
        config.checkpoint.every = config.evaluation.every = 250
        config.evaluation.sequences = config.evaluation.final_sequences = 256
    return config
