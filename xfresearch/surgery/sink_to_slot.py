"""sink_to_slot: a term in the denominator of the softmax becomes a slot whose value is 0.

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
`slot_to_sink` is the inverse.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.mixers.memory_slots import slot_heads, softmax_slots
from xfresearch.models.mixers.softmax.config import Attending, SoftmaxConfig, rotary_size
from xfresearch.models.mixers.softmax.projections import head_sizes, logit_scale
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.network import ATTENDING, Network, Params, Target
from xfresearch.surgery.refused import refuse_unless

Pair = tuple[np.ndarray, np.ndarray]  # keys and values
KEY, VALUE = "memory/key", "memory/value"


def convert(network: Network, mixers: list[Target], broken: bool = False) -> Network:
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
    return rotating(new, a)


def rotating(new: Attending, old: Attending) -> Attending:
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
    old = [scaled_slots(new)] if a.memory_slots else []
    return with_slots(new, *old, (key_MGK, value_MGV))


def scaled_slots(params: Params) -> Pair:
    """Keys and values of the slots in the scale that attention reads."""
    key_MGK, value_MGV = params[KEY], params[VALUE]
    return np.sqrt(key_MGK.shape[-1]) * key_MGK, np.sqrt(len(value_MGV)) * value_MGV


def with_slots(params: Params, *slots: Pair) -> Params:
    """The parameters with these slots, which are stored over the roots of their size and their number."""
    key_MGK, value_MGV = (np.concatenate(each) for each in zip(*slots, strict=True))
    stored = {KEY: key_MGK / np.sqrt(key_MGK.shape[-1]), VALUE: value_MGV / np.sqrt(len(value_MGV))}
    return params | stored


def maps_to_heads(a: Attending) -> list[str]:
    """The linear maps whose last dimension is that of a head."""
    maps = ["query", "key"] + (["value"] if a.value == "learned" else [])
    return maps + (["gate"] if a.output_gate == "elementwise" and a.value != "identity_whole" else [])


def _wider(a: Attending, params: Params, sink_H: np.ndarray) -> Params:
    """The parameters with one more dimension of each head: b in the query, 0 elsewhere."""
    new = dict(params)
    for name in maps_to_heads(a):
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


SINK_TO_SLOT = Conversion(
    name="sink_to_slot",
    about="the sink of the softmax as a slot whose value is 0",
    conditions="softmax attention with a sink; for a learned sink: matrices of queries, keys and outputs, and no relative "
    "keys, norms or clipping of queries",
    broken="with two slots, or with the logit 0 for b",
    convert=convert,
    roles=ATTENDING,
)
