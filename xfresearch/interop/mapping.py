"""Maps each tensor of a Hugging Face model to our parameters: a family's rows, expanded over layers and experts."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from xfresearch.interop.family import Family, Part, TensorRow
from xfresearch.models import transformer
from xfresearch.models.layers import layers
from xfresearch.models.mixers.softmax.config import rotary_size
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.token_stack import TokenStackConfig
from xfresearch.runtime.trees import path_name


class TensorMapping(NamedTuple):
    """One Hugging Face tensor and the parts of our parameters that it holds."""

    name: str  # of the Hugging Face tensor
    shape: tuple[int, ...]
    row: TensorRow
    parts: tuple[Part, ...]
    rotated: int  # head dimensions that RoPE rotates in another order than ours; 0 for none

    def views(self, tensor: np.ndarray) -> Iterator[tuple[Part, np.ndarray, np.ndarray | slice]]:
        """Each part with a view of `tensor` in our dimensions and the order of the view's last dimension."""
        for number, part in enumerate(self.parts):
            view = self.row.view(tensor, number, self.parts)
            yield part, view, rope_order(self.rotated, part.shape[-1]) if self.rotated else slice(None)


def rope_order(rotated: int, size: int) -> np.ndarray:
    """The order of a head's `size` dimensions that turns interleaved RoPE into ours.

    Interleaved RoPE rotates dimension 2i with 2i + 1 in the first `rotated` dimensions; ours rotates i with
    i + rotated/2.
    """
    return np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, size)])


def mappings(family: Family, model: ModelConfig, shapes: dict[str, tuple]) -> Iterator[TensorMapping]:
    """Every tensor that `family` has for `model`. `shapes` gives the shapes of the model's parameters by path."""
    named = jax.tree_util.tree_leaves_with_path(transformer.axes(model))
    letters = {path_name(path): axes.letters for path, axes in named}
    for row in family.rows:
        stack: TokenStackConfig | None = model.encoder if row.stack else model
        inside = f"{row.stack}/" if row.stack else ""
        if "{layer}" not in row.theirs:
            yield from _mapping(row, row.theirs, inside, (), letters, shapes)
            continue
        if stack is None:
            continue
        for layer in layers(stack):
            block = stack.blocks[layer.block]
            experts = range(_experts(block)) if "{expert}" in row.theirs else [None]
            for expert in experts:
                name = row.theirs.format(layer=layer.number, expert=expert)
                index = (layer.index,) if expert is None else (layer.index, expert)
                yield from _mapping(row, name, f"{inside}blocks/{layer.stack}/", index, letters, shapes, block)


def _mapping(
    row: TensorRow, name: str, stack: str, index: tuple, letters: dict, shapes, block=None
) -> Iterator[TensorMapping]:
    """The mapping of one tensor; nothing if the model lacks its parameters (biases, an untied head)."""
    paths = [stack + ours for ours in row.ours]
    gated = f"{stack}feed_forward/gate/kernel" in shapes
    if paths[0] not in shapes or row.gated not in (None, gated):
        return
    parts = []
    for path in paths:
        parts.append(Part(path, index, letters[path][len(index) :], shapes[path][len(index) :]))
    rotated = rotary_size(parts[0].shape[-1], block.attention.rope.fraction) if row.paired else 0
    yield TensorMapping(name, row.shape(tuple(parts)), row, tuple(parts), rotated)


def _experts(block) -> int:
    """The number of experts of a block, 0 if its feed-forward layer has none."""
    moe = getattr(getattr(block, "feed_forward", None), "moe", None)
    return moe.experts if moe else 0


def is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in (*family.ignored, *family.left_out))
