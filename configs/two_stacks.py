"""What the configs with an encoder and a decoder share: both stacks of one size, with the same kinds of sublayers."""

from xfresearch.configs import common
from xfresearch.run_config.config_files import default_encoder


def base(size: str, sizes: tuple[str, ...], tiny: tuple[str, ...] = ("tiny",)):
    """(config, its two stacks: the encoder and the decoder) of a size, one of `sizes` and of the `tiny` ones. Raises
    UserError for an unknown size."""
    config = common.base("tiny" if size in tiny else size, sizes=(*sizes, *tiny))
    config.model.stacks = {"encoder": default_encoder()}
    config.model.blocks.main.layout = "cross_pre_norm"
    config.data.objective.kind = "seq2seq"
    config.data.corpus, config.source_length = ("translation",), config.sequence_length
    if size in tiny:
        config.model.stacks.encoder.depth = config.model.depth
        config.model.stacks.encoder.blocks.main.attention.heads = config.model.blocks.main.cross_attention.heads = 4
    return config, (config.model.stacks.encoder, config.model)


def attentions(config) -> tuple:
    """The options of all attention: of the encoder, of the decoder, and across."""
    decoder = config.model.blocks.main
    return config.model.stacks.encoder.blocks.main.attention, decoder.attention, decoder.cross_attention


def sized(config, width: int, depth: int, heads: int, hidden: int, length: int) -> None:
    """Sets the sizes of both stacks, and the longest source and target."""
    config.model.width = width
    config.source_length = config.sequence_length = length
    for stack in (config.model.stacks.encoder, config.model):
        stack.depth, stack.blocks.main.feed_forward.hidden = depth, hidden
    for attention in attentions(config):
        attention.heads = heads
