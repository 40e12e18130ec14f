"""The first step of softmax attention: queries, keys and values of the input.

Without a matrix, `identity` gives head h the h-th slice of x, and `identity_whole` gives every head all of x.
value = 'key' is v = x W_K, and value = 'identity_plus' is v = x (a I + b W). query = 'merged' replaces the matrices of
query and key by one trained matrix per head: the logits are x_l W_h x_s^T / sqrt(head_size), with W_h of size D x D, or
A_h B_h^T with A_h and B_h of size D x rank.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from xfresearch.models.context import Context
from xfresearch.models.linear import IdentityPlus, Linear, Shape
from xfresearch.models.norms import Norm
from xfresearch.models.parameters import kernel_std
from xfresearch.models.place import Place


class HeadSizes(NamedTuple):
    qk: int  # of a query and of a key
    v: int  # of a value
    key_heads: int  # 1 if every head reads the same keys
    value_heads: int


def head_sizes(a, width: int, read_width: int = 0) -> HeadSizes:
    """Sizes of the heads of attention with options `a` in a model of width `width`. `read_width` is the width of the input
    of keys and values, by default the same."""
    read_width = read_width or width
    whole = a.key == "identity_whole"  # query = 'merged' at full rank has this key too
    qk = a.rank or (read_width if whole else width if a.query == "identity_whole" else a.head_size)
    key_heads = 1 if whole else a.kv_heads
    if a.value == "key":
        return HeadSizes(qk, qk, key_heads, key_heads)
    if a.value == "identity_whole":
        return HeadSizes(qk, read_width, key_heads, 1)
    return HeadSizes(qk, a.head_size, key_heads, a.kv_heads)


def sizes_at(place: Place) -> HeadSizes:
    """Sizes of the heads of attention at its place."""
    return head_sizes(place.options, place.width, place.read_width)


def matrices(place: Place) -> dict[str, Shape]:
    """The shape of each learned matrix."""
    a, width, s = place.options, place.width, sizes_at(place)
    letters = "W->GK" if place.source_width else "D->GK"  # keys and values of a source do not read the stream
    shapes = {} if a.query.startswith("identity") else {"query": Shape("D->HK", width, a.heads, s.qk)}
    shapes |= {"key": Shape(letters, place.read_width, s.key_heads, s.qk)} if a.key == "learned" else {}
    if a.value in ("learned", "identity_plus"):
        shapes |= {"value": Shape(letters, place.read_width, s.value_heads, s.v)}
    shapes |= {"output": Shape("HK->D", a.heads, s.v, width)} if a.output == "learned" else {}
    return shapes


def linears(place: Place, shapes: dict[str, Shape], rngs) -> dict[str, Linear]:
    """The learned matrices, given their shapes."""
    a = place.options
    return {
        name: (IdentityPlus if name == "value" and a.value == "identity_plus" else Linear)(
            place, shape, rngs, bias=name in a.bias, scale=_scale(place, name)
        )
        for name, shape in shapes.items()
    }


def _scale(place: Place, name: str) -> float:
    """Scale of an initial matrix."""
    a = place.options
    if name == "query" and a.shaping == "shaped":  # the initial weights are uniform: A = C (He & Hofmann 2023, sec. 3)
        return 0.0
    if name == "query" and a.query == "merged" and not a.rank:  # logits as large as those of W_Q W_K^T
        return math.sqrt(a.head_size) * kernel_std(place, place.read_width)
    if name in ("query", "key") and a.rank:  # the same for A_h B_h^T of any rank
        return (a.head_size / a.rank) ** 0.25
    if name == "output":
        return place.output_scale
    return place.inner_scale if name == "value" else 1.0


def qk_norm_shapes(place: Place) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Letters and sizes of the dimensions of the norms of queries and keys; {} without norms."""
    a, s = place.options, sizes_at(place)
    heads = {"query": ("H", a.heads), "key": ("G", s.key_heads)} if a.qk_norm != "none" else {}
    if a.qk_norm_over == "head":
        return {name: ("K", (s.qk,)) for name in heads}
    return {name: (f"{letter}K", (count, s.qk)) for name, (letter, count) in heads.items()}


def qk_norms(place: Place, spec) -> dict[str, Norm]:
    shapes = qk_norm_shapes(place)
    return {name: Norm(spec, *shape, place.param_dtype) for name, shape in shapes.items()}


def logit_scale(a, width: int, read_width: int = 0) -> float:
    """Factor of the attention logits."""
    return a.scale or (a.head_size if a.query == "merged" else head_sizes(a, width, read_width).qk) ** -0.5


def heads_of(linear: Linear | None, x_BLD, heads: int, size: int, ctx: Context):
    """[B, L, heads, size]: the linear map of x. Without a map it is x itself, split among the heads or whole for each
    head."""
    if linear is not None:
        return linear(x_BLD, ctx)
    # Without this, jaxlib 0.10's partitioner sums the gradient of x wrongly if data, fsdp and tensor are all sharded.
    x_BLD = ctx.shard(x_BLD, "BLD")
    if x_BLD.shape[-1] == heads * size:
        return x_BLD.reshape(*x_BLD.shape[:2], heads, size)
    return jnp.broadcast_to(x_BLD[:, :, None], (*x_BLD.shape[:2], heads, size))
