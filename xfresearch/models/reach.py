"""How far back the trained spans of a model reach, which limits the computation of attention."""

from xfresearch.models.layers import stacks
from xfresearch.models.mixers.softmax.span import reach
from xfresearch.models.model_config import ModelConfig


def trained_reach(model: ModelConfig, params: dict) -> tuple[tuple[str, int], ...]:
    """Execution.reach for `params`: (block, number of past tokens) for each block of the decoder whose trained spans need
    less than its window. The widest head in all layers of a block decides."""
    reaches = []
    for block, branch, place in model.places():
        stacked = (params["blocks"][s.name][branch.name] for s in stacks(model) if s.block == block)
        reaches.append((block, reach(place.options, model.max_length, stacked)))
    return tuple((block, tokens) for block, tokens in reaches if tokens)
