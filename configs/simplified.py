"""The simplified parallel block (He & Hofmann 2023, SAS-P): shaped attention, no skips, W_V = W_O = I.

simplified         18 layers of width 768, the paper's size
simplified:3m      about 3 M parameters on WikiText-2
simplified:tiny    runs in less than a minute on two cores

As in the authors' code, only the first layer has a W_V, which starts as the identity, and the last norm is a LayerNorm.
--config.model.blocks.main.layout=skipless makes it SAS, where the feed-forward layer reads attention's output.

The first layer follows `main`: overrides of `main` apply to it too, overrides of `first` to it alone.
"""

from xfresearch.configs import common
from xfresearch.options.groups import follow


def get_config(size: str = "full"):
    config = common.base(size)
    model, block = config.model, config.model.blocks.main
    block.layout, block.norm, block.feed_forward.kind = "skipless_parallel", "rms", "relu"
    block.attention.shaping, block.attention.bias = "shaped", ("query", "key")
    block.attention.value = block.attention.output = "identity"
    model.position, model.final_norm = "learned", "layer"
    if size == "full":
        model.width, model.depth, block.attention.heads = 768, 18, 12
        model.vocab_size, model.init = 50_257, "normal"
        config.data.bpe_vocab, config.sequence_length, config.batch_size, config.steps = 50_257, 128, 128, 40_000
        config.optimizer.learning_rate, config.optimizer.beta2, config.optimizer.warmup = 1e-3, 0.999, 2_000
        config.optimizer.schedule, config.optimizer.final_fraction = "linear", 0.0
    if size == "3m":
        block.feed_forward.hidden = 1280
    model.blocks.first = follow(block)
    model.blocks.first.attention.value = "identity_plus"
    model.segments = ((("first",), 1), (("main",), 0))
    return config
