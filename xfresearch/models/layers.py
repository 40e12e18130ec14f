"""How the layers of a model relate to the stacks that its parameters are kept in.

A model is a list of segments, each a pattern of blocks that is repeated. The layers of one place in a pattern are stacked:
their parameters lie in one array with the dimension N in front, under one name in params["blocks"]. This is the only file
that relates the number of a layer, its stack and its place in it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.errors import UserError


class StackPlace(NamedTuple):
    """A stack of layers: one place in the pattern of one segment."""

    name: str  # in params["blocks"]
    block: str  # the name of its options in model.blocks
    repeats: int  # layers in it


class Layer(NamedTuple):
    number: int
    stack: str
    block: str
    index: int  # in its stack


def segments(model) -> tuple[tuple[tuple[str, ...], int], ...]:
    """((pattern, repeats), ...) of a model's stack of blocks, in order."""
    return model.segments or ((model.pattern, model.depth // len(model.pattern)),)


def segment_stacks(model) -> list[list[StackPlace]]:
    """The stacks of each segment. A stack has its block's name, with its number where the block recurs."""
    names = [name for pattern, _ in segments(model) for name in pattern]
    unique = iter([name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)])
    return [[StackPlace(next(unique), name, repeats) for name in pattern] for pattern, repeats in segments(model)]


def stacks(model) -> list[StackPlace]:
    """All stacks of a model."""
    return [stack for segment in segment_stacks(model) for stack in segment]


def most_repeats(model) -> int:
    """The repeats of the longest segment."""
    return max(repeats for _, repeats in segments(model))


def layers(model) -> list[Layer]:
    """All layers of a model, in the order in which they are computed."""
    found = []
    for segment in segment_stacks(model):
        for index in range(segment[0].repeats):
            found += [Layer(len(found) + i, stack.name, stack.block, index) for i, stack in enumerate(segment)]
    return found


def layer(model, number: int) -> Layer:
    """Layer `number`; UserError for one that there is not."""
    if not 0 <= number < model.depth:
        raise UserError(f"layer {number}: this model has layers 0 to {model.depth - 1}")
    return layers(model)[number]


def get(model, params: dict, number: int) -> dict:
    """The parameters of layer `number`, without the dimension N."""
    at = layer(model, number)
    return jax.tree.map(lambda leaf: leaf[at.index], params["blocks"][at.stack])


def put(model, params: dict, number: int, new: dict) -> dict:
    """`params` with the parameters of layer `number` replaced by `new`, of the same shapes."""
    at = layer(model, number)
    stacked = jax.tree.map(lambda leaf, value: leaf.at[at.index].set(value), params["blocks"][at.stack], new)
    return params | {"blocks": params["blocks"] | {at.stack: stacked}}


def stack(trees: list):
    """Equal trees of several layers as one tree, with the dimension N in front."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack(tree, count: int) -> list:
    """A tree of `count` layers as a list of trees.

    The backward pass stacks the cotangents once; that of plain slices would add `count` padded copies of the whole.
    """
    leaves, structure = jax.tree.flatten(tree)
    pieces = [_unstack(leaf, count) for leaf in leaves]
    return [structure.unflatten([each[i] for each in pieces]) for i in range(count)]


def _unstack(array, count: int):
    @jax.custom_vjp
    def cut(array):
        return tuple(array[i] for i in range(count))

    cut.defvjp(lambda array: (cut(array), None), lambda _, cotangents: (jnp.stack(cotangents),))
    return cut(array)
