"""Sizes of a layer's queries, keys and values, from its config alone (no JAX, so that configs are checked without it)."""

from typing import NamedTuple

PROJECTIONS = ("query", "key", "value", "output")


class HeadSizes(NamedTuple):
    qk: int  # of a query and of a key
    v: int  # of a value
    key_heads: int  # 1 where every head reads the same
    value_heads: int


def head_sizes(a, width: int) -> HeadSizes:
    """Of attention config `a` in a model of width `width`."""
    whole = a.key == "identity_whole"  # also what query = 'merged' reads
    qk = a.rank or (width if whole or a.query == "identity_whole" else a.head_size)
    key_heads = 1 if whole else a.kv_heads
    if a.value == "key":
        return HeadSizes(qk, qk, key_heads, key_heads)
    if a.value == "identity_whole":
        return HeadSizes(qk, width, key_heads, 1)
    return HeadSizes(qk, a.head_size, key_heads, a.kv_heads)


def matrices(block, width: int) -> dict[str, tuple]:
    """(inputs, outputs, whether it has a bias) of each of attention's matrices that is learned."""
    a, s = block.attention, head_sizes(block.attention, width)
    if not has_heads(a):
        return {}
    tokens = a.kind == "softmax"  # slots alone have keys and values for parameters
    found = {} if a.query.startswith("identity") else {"query": ((width,), (a.heads, s.qk))}
    found |= {"key": ((width,), (s.key_heads, s.qk))} if tokens and a.key == "learned" else {}
    found |= {"value": ((width,), (s.value_heads, s.v))} if tokens and a.value in ("learned", "identity_plus") else {}
    found |= {"output": ((a.heads, s.v), (width,))} if a.output == "learned" else {}
    return {name: (*sizes, name in a.bias) for name, sizes in found.items()}


def qk_norm_shapes(a, width: int) -> dict[str, tuple]:
    """The dimensions that the norms of queries and of keys are over, none where there are no such norms."""
    s = head_sizes(a, width)
    heads = {"query": a.heads, "key": s.key_heads} if a.qk_norm != "none" else {}
    return {name: (s.qk,) if a.qk_norm_over == "head" else (count, s.qk) for name, count in heads.items()}


def cache_shapes(a, sizes: HeadSizes) -> dict[str, tuple[int, int]]:
    """Shapes of what attention caches of a token. Values tied to keys are kept once where nothing sets the two apart."""
    once = a.value == "key" and a.position != "rope" and a.qk_norm == "none"
    value = {} if once else {"value": (sizes.value_heads, sizes.v)}
    return {"key": (sizes.key_heads, sizes.qk)} | value


def logit_scale(a, width: int) -> float:
    """Factor of the attention logits."""
    return a.scale or (a.head_size if a.query == "merged" else head_sizes(a, width).qk) ** -0.5


def softmax_slots(a) -> int:
    """Persistent slots M that join the softmax of the heads."""
    return a.memory_slots if a.memory_activation == "softmax" else 0


def wide_slots(a) -> int:
    """Persistent slots M of the model's width, read beside the heads or, under kind = 'slots', alone."""
    return a.memory_slots - softmax_slots(a)


def has_heads(a) -> bool:
    """Whether an attention config has heads: slots of the model's width alone have none."""
    return a.kind != "slots" or not wide_slots(a)


def slot_heads(a) -> int:
    """Key-value heads that have persistent slots of their own; 1 where all share one set."""
    return a.kv_heads if a.memory_heads == "each" else 1


def longest(a, model) -> int:
    """How many tokens back attention can reach."""
    return a.window or model.max_length


def rotary_size(size: int, fraction: float) -> int:
    """Dimensions of a head of `size` that RoPE turns."""
    return int(size * fraction + 1e-6)


def position_rows(model) -> int:
    """Rows of the table of learned positions, 0 where there is none; the first `position_offset` are never read."""
    return model.max_length + model.position_offset if model.position == "learned" else 0


def longest_sequence(model) -> int:
    """Tokens that the model's tables of positions reach, 0 where it has none: learned ones, or a relative key without a
    window."""
    blocks = model.blocks.values()
    relative = any(b.attention.position == "relative_key" and not b.attention.window for b in blocks)
    return model.max_length if model.position == "learned" or relative else 0
