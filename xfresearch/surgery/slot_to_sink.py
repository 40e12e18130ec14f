"""slot_to_sink: a slot whose value is 0 and whose logit is constant becomes a term in the denominator of the softmax.

    sum_s e^(q k_s) v_s / (e^b + sum_s e^(q k_s))        b: the logit of the slot

A slot with key 0 has the logit 0 for every token: it becomes the off-by-one sink. A slot with key k has the logit

    scale (x W_Q + b_Q) k^T = scale b_Q k^T = b        if W_Q k^T = 0

for each head, which becomes the learned sink; with a softcap c, c tanh(b / c). Attention with a learned sink has no other
slots here.

Then the last dimension of the heads goes, if all keys and all values are 0 there. So this is the inverse of
`sink_to_slot`. RoPE must not rotate this dimension.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from xfresearch.models.mixers.memory_slots import softmax_slots
from xfresearch.models.mixers.softmax.config import Attending, SoftmaxConfig, rotary_size
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.key_value_groups import group_of_heads
from xfresearch.surgery.network import ATTENDING, Network, Params, Target
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.sink_to_slot import KEY, VALUE, maps_to_heads, rotating, scaled_slots, with_slots

Sink = Literal["none", "off_by_one", "learned"]
OTHERS = "e^(q k) of the others depends on the token, or adds v"


def convert(network: Network, mixers: list[Target], broken: bool = False) -> Network:
    zero = all([_check(each.options, network.inside(each), each.where) for each in mixers])  # a list: all are checked
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


def _check(a, params: Params, where: str) -> bool:
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
    key_MGK, _ = scaled_slots(params)
    return np.broadcast_to(key_MGK[0], (a.kv_heads, key_MGK.shape[-1]))[group_of_heads(a)]


def _sunk(a: Attending, sink: Sink) -> Attending:
    left = a.memory_slots - 1
    return replace(a, sink=sink, memory_slots=left, memory_heads=a.memory_heads if left else "each")


def _without_slot(target: Target[Attending], params: Params, sink: str, broken: bool) -> Params:
    """The parameters without the first slot of zeros, or with the logit of the only slot."""
    new = {path: value for path, value in params.items() if path not in (KEY, VALUE)}
    if sink == "learned":
        return new if broken else new | {"sink": _logits(target, params)}
    key_MGK, value_MGV = scaled_slots(params)
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
    new = rotating(replace(a, head_size=a.head_size - 1, bias=given, scale=0.0), a)
    scale = logit_scale(a, *widths)
    return new if logit_scale(new, *widths) == scale else replace(new, scale=scale)


def _cut(a: Attending, params: Params, bias: bool) -> Params:
    """The parameters without the last dimension of the heads."""
    cut = {f"{name}/{part}" for name in maps_to_heads(a) for part in ("kernel", "bias")}
    gone = set() if bias else {"query/bias"}
    new = {path: value[..., :-1] if path in cut else value for path, value in params.items() if path not in gone}
    if a.value != "identity_whole":
        new["output/kernel"] = params["output/kernel"][:, :-1]
    if a.memory_slots:
        key_MGK, value_MGV = scaled_slots(params)
        value_MGV = value_MGV if a.value == "identity_whole" else value_MGV[..., :-1]
        new = with_slots(new, (key_MGK[..., :-1], value_MGV))
    return new


SLOT_TO_SINK = Conversion(
    name="slot_to_sink",
    about="a slot with value 0 and a constant logit as the sink of the softmax",
    conditions="a slot in the softmax with value 0, and with key 0 or W_Q k = 0 in every head; no sink",
    broken="with the sink lost",
    convert=convert,
    roles=ATTENDING,
)
