"""Where each tensor of a Hugging Face model lies in our parameters: a family's rows, over a model's layers and experts."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from xfresearch.interop.family import Family, Row
from xfresearch.models import transformer
from xfresearch.models.layers import layers
from xfresearch.models.mixers.softmax.config import rotary_size
from xfresearch.models.model_config import ModelConfig
from xfresearch.trees import path_name


class Part(NamedTuple):
    """The piece of one of our parameters that (a part of) a tensor of theirs holds."""

    path: str  # 'blocks/main/attention/query/kernel'
    index: tuple[int, ...]  # in its first dimensions: of the layer in its stack, of the expert
    letters: str  # of the dimensions that are left
    shape: tuple[int, ...]


class Place(NamedTuple):
    name: str  # of their tensor
    shape: tuple[int, ...]
    row: Row
    parts: tuple[Part, ...]
    turned: int  # dimensions of a head whose order RoPE asks to change; 0 for none

    def views(self, tensor: np.ndarray) -> Iterator[tuple[Part, np.ndarray, np.ndarray | slice]]:
        """Each part, a view of `tensor` with our dimensions, and the order in which its last dimension is to be taken."""
        for number, part in enumerate(self.parts):
            view = self.row.view(tensor, number, part.letters, part.shape)
            yield part, view, pairs(self.turned, part.shape[-1]) if self.turned else slice(None)


def pairs(turned: int, size: int) -> np.ndarray:
    """Where our dimension i of a head of `size` stands in theirs, who turn 2i with 2i + 1 in the first `turned`."""
    return np.concatenate([np.arange(0, turned, 2), np.arange(1, turned, 2), np.arange(turned, size)])


def places(family: Family, model: ModelConfig, shapes: dict[str, tuple]) -> Iterator[Place]:
    """Every tensor that `family` has for `model`, whose parameters have these `shapes` by path."""
    named = jax.tree_util.tree_leaves_with_path(transformer.axes(model))
    letters = {path_name(path): axes.letters for path, axes in named}
    for row in family.rows:
        if "{layer}" not in row.theirs:
            yield from _place(row, row.theirs, "", (), letters, shapes)
            continue
        for layer in layers(model):
            block = model.blocks[layer.block]
            experts = range(block.feed_forward.moe.experts) if "{expert}" in row.theirs else [None]
            for expert in experts:
                name = row.theirs.format(layer=layer.number, expert=expert)
                at = (layer.index,) if expert is None else (layer.index, expert)
                yield from _place(row, name, f"blocks/{layer.stack}/", at, letters, shapes, block)


def _place(row: Row, name: str, stack: str, index: tuple, letters: dict, shapes, block=None) -> Iterator[Place]:
    """The place of one tensor; none where the model does not have its parameters (biases, an untied head)."""
    paths = [stack + ours for ours in row.ours]
    if paths[0] not in shapes:
        return
    parts = []
    for path in paths:
        parts.append(Part(path, index, letters[path][len(index) :], shapes[path][len(index) :]))
    turned = rotary_size(parts[0].shape[-1], block.attention.rope.fraction) if row.paired else 0
    yield Place(name, row.shape(parts[0].letters, parts[0].shape), row, tuple(parts), turned)


def is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.ignored)
