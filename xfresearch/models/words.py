"""A model in words: '4 x pre-norm [RMSNorm, 3 heads of 64 with RoPE, SwiGLU 512]'."""

from xfresearch.models import layers
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.norms import title
from xfresearch.models.stack import StackConfig
from xfresearch.models.transformer import Transformer
from xfresearch.runtime.tables import count


def model_in_words(model: ModelConfig) -> str:
    """The width, the positions at the embedding and the blocks of a resolved model."""
    positions = f", {model.position} positions" if model.position != "none" else ""
    blocks = blocks_in_words(model)
    if model.encoder:
        blocks = f"encoder {blocks_in_words(model.encoder)}; decoder {blocks}"
    return f"width {model.width}{positions}: {blocks}"


def blocks_in_words(model: StackConfig) -> str:
    """The blocks in the order of computation, each pattern with its number of repeats."""
    parts = []
    for pattern, repeats in layers.segments(model):
        blocks = ", then ".join(block_in_words(model.blocks[name]) for name in pattern)
        parts.append(f"{repeats} x ({blocks})" if len(pattern) > 1 else f"{repeats} x {blocks}")
    return ", then ".join(parts)


def block_in_words(block: BlockConfig) -> str:
    """A block's layout, the kinds of its norms, and its sublayers."""
    kinds = dict.fromkeys(block.norm_at(site).kind for site in LAYOUTS[block.layout].sites)
    norms = " and ".join(title(kind) for kind in kinds if kind != "none" or len(kinds) == 1)
    sublayers = [options.words for options in block.sublayers.values()]
    return f"{block.layout.replace('_', '-')} [{', '.join(filter(None, [norms, *sublayers]))}]"


def model_line(model: ModelConfig, length: int = 0) -> str:
    """Parameters, FLOPs for sequences of `length` tokens (0: the model's longest), and the blocks, in words."""
    if not model.vocab_size or not (length or model.max_length):
        return model_in_words(model)
    counted = Transformer.costs(model, length or model.max_length)
    active = counted.active_parameters
    used = f" ({count(active)} active)" if active != counted.parameters else ""
    flops = f"{count(counted.flops_per_token, 'G')} FLOPs per token"
    return f"{count(counted.parameters)} parameters{used}, {flops}; {model_in_words(model)}"
