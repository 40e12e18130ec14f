"""Models of some 10 M parameters that know facts: to trace where a fact is stored, and to edit it.

facts                  GPT-2 like, with rotary positions
facts:all_attention    persistent memory slots instead of feed-forward layers, as many as these have units
facts:experts          top-2 of 8 experts
facts:tiny             runs in less than a minute on two cores

Each trains in at most 20 minutes on two cores, on the generated corpus `facts`; `python -m xfresearch.analyze recall`
tells what it knows. docs/questions/where_is_a_fact.md has the results.
"""

from xfresearch.configs import common


def get_config(size: str = "full"):
    config = common.base(size, sizes=("full", "all_attention", "experts", "tiny"))
    model, block = config.model, config.model.blocks.main
    model.dtype = "float32"
    block.attention.position = "rope"
    block.norm_bias = True
    block.attention.bias = ("query", "key", "value", "output")
    block.feed_forward.kind, block.feed_forward.bias = "gelu_tanh", True
    config.data.corpus, config.data.packing = ("facts",), "documents"
    config.sequence_length = 128  # more than the bytes of a sentence
    if size != "tiny":
        model.width, model.depth, block.attention.heads, block.feed_forward.hidden = 320, 8, 5, 1280
        config.data.bpe_vocab = 2048
        config.batch_size, config.steps = 32, 300
        config.optimizer.kind, config.optimizer.learning_rate, config.optimizer.warmup = "muon", 1e-2, 20
        config.optimizer.schedule, config.optimizer.final_fraction = "linear", 0.0
        config.checkpoint.every = config.evaluation.every = 100
        config.evaluation.sequences = 64
    if size == "all_attention":
        block.attention.memory_slots = block.feed_forward.hidden
        block.layout, model.final_norm = "all_attention", "none"  # every block ends in a norm
        config.batch_size, config.steps = 16, 600  # the same text; a rate of 1e-2 diverges
        config.optimizer.learning_rate, config.optimizer.warmup = 3e-3, 40
    if size == "experts":
        block.feed_forward.kind = "moe"
        block.feed_forward.moe.expert, block.feed_forward.hidden = "gelu_tanh", 320
    return config
