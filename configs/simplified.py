"""The simplified parallel block (He & Hofmann 2023, SAS-P): shaped attention, no skip, W_V and W_O the identity.

configs/simplified.py         18 layers of width 768, the paper's size
configs/simplified.py:3m      about 3 M parameters on WikiText-2
configs/simplified.py:tiny    trains in seconds on a CPU

The depth is set in this file, which makes the pattern of that length: the first layer is not like the others.
"""

from configs import common


def get_config(size: str = "full"):
    config = common.base(size)
    model, block = config.model, config.model.blocks.main
    block.layout, block.norm, block.feed_forward.kind = "skipless_parallel", "rms", "relu"
    block.attention.shaping = "shaped"
    model.position, model.final_norm = "learned", "rms"
    if size == "full":
        model.width, model.depth, block.attention.heads = 768, 18, 12
        model.vocab_size = config.data.bpe_vocab = 50_257
        config.sequence_length, config.batch_size, config.optimizer.learning_rate = 128, 128, 1e-3
    if size == "3m":
        block.feed_forward.hidden = 1280
    # The first layer keeps its W_V (sec. 4.2 of the paper); all others have neither W_V nor W_O.
    model.blocks.first = block.copy_and_resolve_references()
    block.attention.value = block.attention.output = model.blocks.first.attention.output = "identity"
    model.pattern = ("first", *["main"] * (model.depth - 1))
    return config
