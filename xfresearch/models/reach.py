"""How far back the trained spans of a model look, which bounds what there is to compute."""

from xfresearch.models.layers import stacks
from xfresearch.models.mixers.softmax.span import reach
from xfresearch.models.model_config import ModelConfig


def trained_reach(model: ModelConfig, params: dict) -> tuple[tuple[str, int], ...]:
    """(block, tokens back) for each block whose trained spans in `params` need less than its window: what
    Execution.reach takes. Layers of one block share the width of the widest head among them."""
    found = []
    for block, sublayer, place in model.places():
        of_block = [params["blocks"][s.name][sublayer.name] for s in stacks(model) if s.block == block]
        found.append((block, reach(place.options, model.max_length, of_block)))
    return tuple((block, tokens) for block, tokens in found if tokens)
