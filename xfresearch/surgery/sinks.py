"""sink_to_slot and slot_to_sink: a term in the denominator of the softmax, or a slot whose value is 0.

`sink_to_slot` makes a slot of the sink:

    e^b / (e^b + sum_s e^(q k_s)) 0  +  sum_s e^(q k_s) v_s / (e^b + sum_s e^(q k_s))

The off-by-one sink has b = 0, which is the logit of a slot with key 0. It becomes one more slot with zeros, next to those
that the heads have.

The learned sink has a logit b for each head, which does not depend on the token. Each head gets one more dimension:

    q' = [q, b]        k_s' = [k_s, 0]        k_slot = [0, 1 / scale]
    scale q' k_s'^T = scale q k_s^T        scale q' k_slot^T = b

b becomes the query's bias there. `scale` is the factor of the logits before: it stays, although the size of the heads
grows. Values have the size of the heads too: W_V gets a column and W_O a row of zeros. With a softcap c, c tanh(z / c) = b
needs z = c atanh(b / c) in the place of b. RoPE rotates the dimensions that it rotated; slots see queries before it.

There is no place for this dimension where heads are slices of x or x itself, and none in the tables of relative keys. A
norm of queries would divide by a length with b in it, and clipping would limit b. Merged queries have x for a key.

`slot_to_sink` makes a sink of a slot whose value is 0 and whose logit is constant:

    sum_s e^(q k_s) v_s / (e^b + sum_s e^(q k_s))        b: the logit of the slot

A slot with key 0 has the logit 0 for every token: it becomes the off-by-one sink. A slot with key k has the logit

    scale (x W_Q + b_Q) k^T = scale b_Q k^T = b        if W_Q k^T = 0

for each head, which becomes the learned sink; with a softcap c, c tanh(b / c). Attention with a learned sink has no other
slots here.

Then the last dimension of the heads goes, if all keys and all values are 0 there: so it is the inverse of `sink_to_slot`.
RoPE must not rotate this dimension.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from xfresearch.models.mixers.memory_slots import slot_heads, softmax_slots
from xfresearch.models.mixers.softmax.config import Attending, SoftmaxConfig, rotary_size
from xfresearch.models.mixers.softmax.projections import head_sizes, logit_scale
from xfresearch.surgery.key_value_groups import group_of_heads
from xfresearch.surgery.network import ATTENDING, Network, Params, Target
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion

Sink = Literal["none", "off_by_one", "learned"]
Pair = tuple[np.ndarray, np.ndarray]  # keys and values
KEY, VALUE = "memory/key", "memory/value"
OTHERS = "e^(q k) of the others depends on the token, or adds v"


@conversion(
    "the sink of the softmax as a slot whose value is 0",
    conditions="softmax attention with a sink; for a learned sink: matrices of queries, keys and outputs, and no relative "
    "keys, norms or clipping of queries",
    broken="with two slots, or with the logit 0 for b",
    roles=ATTENDING,
)
def sink_to_slot(network: Network, mixers: list[Target], broken: bool = False) -> Network:
    for each in mixers:
        _check_sink(each.options, network.inside(each), each.where)
    return network.change_each(
        mixers, lambda each: _slotted(each, broken), lambda each, params: _add_slot(each, params, broken)
    )


def _check_sink(a, params: Params, where: str) -> None:
    softmax = isinstance(a, Attending)
    refuse_unless(softmax and a.sink != "none", f"{where}: there is no sink")
    wide = a.memory_slots and not softmax_slots(a)
    refuse_unless(not wide, f"{where}: attention has slots of the model's width, and only one kind of slots")
    if a.sink == "off_by_one":
        return
    plain = {"query": ("learned",), "key": ("learned",), "value": ("learned", "key", "identity_whole")}
    for name, kinds in (plain | {"output": ("learned",)}).items():
        given = getattr(a, name)
        refuse_unless(given in kinds, f"{where}: {name}={given!r} has no matrix that one more dimension could join")
    refuse_unless(a.qk_norm == "none", f"{where}: the norm of queries would divide by a length with b in it")
    refuse_unless(not a.clip, f"{where}: clip would limit b")
    refuse_unless(a.position != "relative_key", f"{where}: the table of relative keys has the size of a query")
    largest = np.abs(params["sink"]).max()
    bounded = not a.softcap or largest < a.softcap
    refuse_unless(bounded, f"{where}: c tanh(z / c) = b has no z: |b| = {largest:.3g} is not below softcap={a.softcap}")
    if a.position == "rope":
        rotary = rotary_size(a.head_size, a.rope.fraction)
        same = rotary_size(a.head_size + 1, rotary / (a.head_size + 1)) == rotary
        refuse_unless(same, f"{where}: no rope.fraction rotates {rotary} of {a.head_size + 1} dimensions")


def _slotted(target: Target[Attending], broken: bool) -> Attending:
    """The options with a slot for the sink."""
    a = target.options
    new = replace(a, sink="none", memory_slots=a.memory_slots + _count(a, broken))
    new = new if a.memory_slots else replace(new, memory_heads="shared")
    if a.sink == "off_by_one":
        return new
    size = a.head_size + 1
    bias = a.bias if "query" in a.bias else (*a.bias, "query")
    new = replace(new, head_size=size, scale=logit_scale(a, target.width, target.read_width), bias=bias)
    return _rotating(new, a)


def _rotating(new: Attending, old: Attending) -> Attending:
    """The options `new`, with heads of another size than `old`, of which RoPE rotates as many dimensions."""
    if not isinstance(new, SoftmaxConfig) or not isinstance(old, SoftmaxConfig) or old.position != "rope":
        return new
    fraction = rotary_size(old.head_size, old.rope.fraction) / new.head_size
    return replace(new, rope=replace(old.rope, fraction=fraction))


def _count(a: Attending, broken: bool) -> int:
    """The number of slots that replace the sink. The control has two slots of zeros."""
    return 2 if broken and a.sink == "off_by_one" else 1


def _add_slot(target: Target[Attending], params: Params, broken: bool) -> Params:
    """The parameters with a slot of zeros, or for a learned sink with one more dimension and its logit there."""
    a = target.options
    new = {path: value for path, value in params.items() if path != "sink"}
    if a.sink == "learned":
        new = _wider(a, new, params["sink"])
    sizes = head_sizes(_slotted(target, broken), target.width, target.read_width)
    groups = slot_heads(a) if a.memory_slots else 1
    key_MGK, value_MGV = (np.zeros((_count(a, broken), groups, size)) for size in (sizes.qk, sizes.v))
    if a.sink == "learned":
        key_MGK[..., -1] = 0.0 if broken else 1 / logit_scale(a, target.width, target.read_width)
    old = [_scaled_slots(new)] if a.memory_slots else []
    return with_slots(new, *old, (key_MGK, value_MGV))


def _scaled_slots(params: Params) -> Pair:
    """Keys and values of the slots in the scale that attention reads."""
    key_MGK, value_MGV = params[KEY], params[VALUE]
    return np.sqrt(key_MGK.shape[-1]) * key_MGK, np.sqrt(len(value_MGV)) * value_MGV


def with_slots(params: Params, *slots: Pair) -> Params:
    """The parameters with these slots, which are stored over the roots of their size and their number."""
    key_MGK, value_MGV = (np.concatenate(each) for each in zip(*slots, strict=True))
    stored = {KEY: key_MGK / np.sqrt(key_MGK.shape[-1]), VALUE: value_MGV / np.sqrt(len(value_MGV))}
    return params | stored


def _maps_to_heads(a: Attending) -> list[str]:
    """The linear maps whose last dimension is that of a head."""
    maps = ["query", "key"] + (["value"] if a.value == "learned" else [])
    return maps + (["gate"] if a.output_gate == "elementwise" and a.value != "identity_whole" else [])


def _wider(a: Attending, params: Params, sink_H: np.ndarray) -> Params:
    """The parameters with one more dimension of each head: b in the query, 0 elsewhere."""
    new = dict(params)
    for name in _maps_to_heads(a):
        for part in ("kernel", "bias"):
            if f"{name}/{part}" in params:
                new[f"{name}/{part}"] = _padded(params[f"{name}/{part}"], -1)
    new.setdefault("query/bias", np.zeros(new["query/kernel"].shape[1:]))
    cap = a.softcap
    new["query/bias"][:, -1] = cap * np.arctanh(sink_H / cap) if cap else sink_H
    if a.value != "identity_whole":
        new["output/kernel"] = _padded(params["output/kernel"], 1)
    return new


def _padded(value: np.ndarray, axis: int) -> np.ndarray:
    """An array with one more zero at the end of a dimension."""
    sizes = [(0, 0)] * value.ndim
    sizes[axis] = (0, 1)
    return np.pad(value, sizes)


@conversion(
    "a slot with value 0 and a constant logit as the sink of the softmax",
    conditions="a slot in the softmax with value 0, and with key 0 or W_Q k = 0 in every head; no sink",
    broken="with the sink lost",
    roles=ATTENDING,
)
def slot_to_sink(network: Network, mixers: list[Target], broken: bool = False) -> Network:
    zero = all([_check_slot(each.options, network.inside(each), each.where) for each in mixers])  # a list: all are checked
    sink: Sink = "off_by_one" if zero else "learned"
    for each in mixers:
        count = each.options.memory_slots
        refuse_unless(zero or count == 1, f"{each.where}: a learned sink has no slots beside it, and {count - 1} stay")
    sunk = network.change_each(
        mixers,
        lambda each: _sunk(each.options, "none" if broken else sink),
        lambda each, params: _without_slot(each, params, sink, broken),
    )
    mixers = sunk.again(mixers)
    free = all(_last_is_free(each.options, sunk.inside(each)) for each in mixers)
    return _without_last(sunk, mixers) if free else sunk


def _check_slot(a, params: Params, where: str) -> bool:
    """Whether a slot has key 0 and value 0 in every head. Raises Refused if no slot is a sink."""
    softmax = isinstance(a, Attending) and softmax_slots(a)
    refuse_unless(bool(softmax), f"{where}: there are no slots in the softmax of attention")
    refuse_unless(a.sink == "none", f"{where}: there is a sink already: sink={a.sink!r}")
    if _zero_slots(params).any():
        return True
    valueless = ~params[VALUE].any((1, 2))
    refuse_unless(bool(valueless.any()), f"{where}: no slot has the value 0 in every head: {OTHERS}")
    linear = "query/kernel" in params and not a.rank
    refuse_unless(linear, f"{where}: query={a.query!r} gives no slot a constant logit but key 0")
    refuse_unless(a.qk_norm == "none", f"{where}: the norm of queries divides b_Q k by a length, which depends on the token")
    refuse_unless(not a.clip, f"{where}: clip would limit b_Q")
    images_DH = np.einsum("dhk,hk->dh", params["query/kernel"], _key_of_heads(a, params))
    refuse_unless(not images_DH.any(), f"{where}: no slot with value 0 has W_Q k = 0 in every head: {OTHERS}")
    return False


def _zero_slots(params: Params) -> np.ndarray:
    """Which slots [M] have key 0 and value 0 in every head."""
    return np.logical_not(params[KEY].any((1, 2)) | params[VALUE].any((1, 2)))


def _key_of_heads(a: Attending, params: Params) -> np.ndarray:
    """The key [H, K] of the first slot for each head, in the scale that attention reads."""
    key_MGK, _ = _scaled_slots(params)
    return np.broadcast_to(key_MGK[0], (a.kv_heads, key_MGK.shape[-1]))[group_of_heads(a)]


def _sunk(a: Attending, sink: Sink) -> Attending:
    left = a.memory_slots - 1
    return replace(a, sink=sink, memory_slots=left, memory_heads=a.memory_heads if left else "each")


def _without_slot(target: Target[Attending], params: Params, sink: str, broken: bool) -> Params:
    """The parameters without the first slot of zeros, or with the logit of the only slot."""
    new = {path: value for path, value in params.items() if path not in (KEY, VALUE)}
    if sink == "learned":
        return new if broken else new | {"sink": _logits(target, params)}
    key_MGK, value_MGV = _scaled_slots(params)
    others = np.arange(len(key_MGK)) != np.argmax(_zero_slots(params))
    return with_slots(new, (key_MGK[others], value_MGV[others])) if others.any() else new


def _logits(target: Target[Attending], params: Params) -> np.ndarray:
    """The logit b [H] of the only slot."""
    a = target.options
    bias_HK = params.get("query/bias", np.zeros(1))
    logits_H = logit_scale(a, target.width, target.read_width) * (bias_HK * _key_of_heads(a, params)).sum(-1)
    return a.softcap * np.tanh(logits_H / a.softcap) if a.softcap else logits_H


def _last_is_free(a, params: Params) -> bool:
    """Whether nothing reads the last dimension of the heads."""
    plain = a.query == a.key == a.output == "learned" and a.value in ("learned", "key", "identity_whole")
    rotary = rotary_size(a.head_size, a.rope.fraction) if isinstance(a, SoftmaxConfig) and a.position == "rope" else 0
    fixed = a.qk_norm != "none" or a.position == "relative_key"  # a norm's length and a table have all dimensions
    if not plain or fixed or a.clip or a.rank or rotary == a.head_size:
        return False
    paths = [KEY, VALUE, *(f"{name}/{part}" for name in ("key", "value") for part in ("kernel", "bias"))]
    paths = [path for path in paths if path in params]
    paths = [path for path in paths if a.value != "identity_whole" or path != VALUE]  # its values have the model's width
    return not any(params[path][..., -1].any() for path in paths)


def _without_last(network: Network, mixers: list[Target]) -> Network:
    """The network without the last dimension of the heads, and without query biases if all of them are 0 then."""
    bias = any(network.inside(each).get("query/bias", np.zeros(2))[..., :-1].any() for each in mixers)
    return network.change_each(
        mixers, lambda each: _smaller(each, bias), lambda each, params: _cut(each.options, params, bias)
    )


def _smaller(target: Target[Attending], bias: bool) -> Attending:
    a, widths = target.options, (target.width, target.read_width)
    given = tuple(name for name in a.bias if bias or name != "query")
    new = _rotating(replace(a, head_size=a.head_size - 1, bias=given, scale=0.0), a)
    scale = logit_scale(a, *widths)
    return new if logit_scale(new, *widths) == scale else replace(new, scale=scale)


def _cut(a: Attending, params: Params, bias: bool) -> Params:
    """The parameters without the last dimension of the heads."""
    cut = {f"{name}/{part}" for name in _maps_to_heads(a) for part in ("kernel", "bias")}
    gone = set() if bias else {"query/bias"}
    new = {path: value[..., :-1] if path in cut else value for path, value in params.items() if path not in gone}
    if a.value != "identity_whole":
        new["output/kernel"] = params["output/kernel"][:, :-1]
    if a.memory_slots:
        key_MGK, value_MGV = _scaled_slots(params)
        value_MGV = value_MGV if a.value == "identity_whole" else value_MGV[..., :-1]
        new = with_slots(new, (key_MGK[..., :-1], value_MGV))
    return new
