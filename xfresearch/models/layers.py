"""Maps the layers of a model to stacks of parameters.

A model is a list of segments. Each segment repeats a pattern of blocks. All layers of a segment at one position of its
pattern form a stack, with one name in params["blocks"]: each of their parameters is one array with the dimension N in front.
This is the only file that maps the number of a layer to its stack and its index in the stack.
"""

from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.runtime.errors import UserError


class StackPlace(NamedTuple):
    """A stack of layers: one position in the pattern of a segment."""

    name: str  # in params["blocks"]
    block: str  # key of its options in model.blocks
    repeats: int  # number of layers


class Layer(NamedTuple):
    number: int
    stack: str
    block: str
    index: int  # type: ignore[assignment]  # in the stack; this field hides a method of tuples


def segments(model) -> tuple[tuple[tuple[str, ...], int], ...]:
    """((pattern, repeats), ...) of a model's stack of blocks, in order."""
    return model.segments or ((model.pattern, model.depth // len(model.pattern)),)


def segment_stacks(model) -> list[list[StackPlace]]:
    """The stacks of each segment. A stack has the name of its block, plus a number if several stacks use the block."""
    names = [name for pattern, _ in segments(model) for name in pattern]
    uses = Counter(names)
    unique = iter([name if uses[name] == 1 else f"{name}_{i}" for i, name in enumerate(names)])
    return [[StackPlace(next(unique), name, repeats) for name in pattern] for pattern, repeats in segments(model)]


def stacks(model) -> list[StackPlace]:
    """All stacks of a model."""
    return [stack for segment in segment_stacks(model) for stack in segment]


def most_repeats(model) -> int:
    """The number of layers in the largest stack."""
    return max(repeats for _, repeats in segments(model))


def layers(model) -> list[Layer]:
    """All layers of a model, in the order of computation."""
    numbered: list = []
    for segment in segment_stacks(model):
        for index in range(segment[0].repeats):
            numbered += [Layer(len(numbered) + i, stack.name, stack.block, index) for i, stack in enumerate(segment)]
    return numbered


def layer(model, number: int) -> Layer:
    """Layer `number`. Raises UserError if it does not exist."""
    if number not in range(model.depth):
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


def get_leaf(model, params: dict, number: int, path: tuple[str, ...]):
    """One parameter of layer `number`, such as ('feed_forward', 'down', 'kernel')."""
    at = layer(model, number)
    leaf = params["blocks"][at.stack]
    for key in path:
        leaf = leaf[key]
    return leaf[at.index]


def put_leaf(model, params: dict, number: int, path: tuple[str, ...], value) -> dict:
    """`params` with one parameter of layer `number` replaced. All other arrays are those of `params`, not copies."""
    at = layer(model, number)

    def put_in(tree, path: tuple[str, ...]):
        return tree | {path[0]: put_in(tree[path[0]], path[1:])} if path else tree.at[at.index].set(value)

    return params | {"blocks": params["blocks"] | {at.stack: put_in(params["blocks"][at.stack], path)}}


def apart(model, params: dict) -> dict:
    """`params` with each stack as a dict of layers {index in the stack: parameters}. The arrays are copies.

    A program that reads stacks copies each layer out of them before its matrix products. A program that runs many times,
    such as the decoding of a token, gets these copies instead.
    """
    blocks = {place.name: unstack(params["blocks"][place.name], place.repeats) for place in stacks(model)}
    return params | {"blocks": {name: dict(enumerate(each)) for name, each in blocks.items()}}


def are_apart(params: dict) -> bool:
    """Whether `apart` made the parameters."""
    return any(0 in of_layers for of_layers in params.get("blocks", {}).values())


def stack(trees: list):
    """Stacks the trees of several layers into one tree, with the dimension N in front."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def unstack(tree, count: int) -> list:
    """The inverse of `stack`: a list of the `count` trees of the layers, from a tree whose arrays have N = count in front.

    The backward pass stacks the gradients of the layers, once for each array. Without the rule below JAX would make an array
    of the whole stack for the gradient of every layer, with zeros for all other layers, and add these arrays up.
    """
    leaves, structure = jax.tree.flatten(tree)
    pieces = [_unstack(leaf, count) for leaf in leaves]
    return [jax.tree.unflatten(structure, [each[i] for each in pieces]) for i in range(count)]


def _unstack(array, count: int):
    @jax.custom_vjp
    def split(array):
        return tuple(array[i] for i in range(count))

    split.defvjp(lambda array: (split(array), None), lambda _, cotangents: (jnp.stack(cotangents),))
    return split(array)
