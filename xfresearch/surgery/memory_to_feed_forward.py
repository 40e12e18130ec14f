"""memory_to_feed_forward: slots of the model's width become a feed-forward layer. Inverse of `feed_forward_to_memory`.

    f(x k^T + b) v + c  =  f(x W_up + b) W_down + c        W_up = k^T, W_down = v

    attention_only, slots beside attention               parallel
    attention_only with attention, then with slots       one layer pre_norm; `layers` names the layer with slots
    all_attention with attention, then with slots        one layer post_norm
    cross_all_attention, then all_attention with slots   one layer cross_post_norm

Slots always have a bias b. A feed-forward layer gets biases if b or c is not 0. Beside attention, c is a part of b_O: if
b is 0, all of it stays there, and otherwise all of it becomes c. Slots in the softmax are normalised together with the
context, sum_m e^(q k_m) v_m / (... + sum_s e^(q k_s)): no feed-forward layer of x alone has this denominator.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import numpy as np

from xfresearch.models.block_config import BlockConfig, NormSite
from xfresearch.models.feed_forwards.dense import DenseConfig
from xfresearch.models.mixers.memory_slots import wide_slots
from xfresearch.models.mixers.slots import SlotsConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.options.fields import with_values
from xfresearch.surgery.feed_forward_to_memory import from_parts
from xfresearch.surgery.layer_blocks import LayerBlock
from xfresearch.surgery.network import Network, Params, in_layout, names_of, options_of
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion

PAIRS = {  # layouts of the layer before and of the layer with slots: the layout of both, and the place of the norm
    ("attention_only", "attention_only"): ("pre_norm", "in"),
    ("all_attention", "all_attention"): ("post_norm", "post"),
    ("cross_all_attention", "all_attention"): ("cross_post_norm", "post"),
}
PLACES = {slots: at for (_, slots), (_, at) in PAIRS.items()}  # of the norm, by the layout of the layer with slots


@conversion(
    "slots of the model's width as a feed-forward layer: parallel, or joined with the layer before",
    conditions="slots of the model's width in attention_only, beside attention or as a layer after it (or in all_attention, "
    "as a layer, also after cross_all_attention), with the same norm options in both layers",
    broken="with the rows of W_down in reverse order",
)
def memory_to_feed_forward(network: Network, layers, broken: bool = False) -> Network:
    whole = len(layers) == len(network.layers)
    has = {n for n, at in enumerate(network.layers) if _convertible(at.block)}
    chosen = has & {*layers} if whole else {*layers}
    refuse_unless(
        bool(chosen), f"no layer has slots of the model's width without a feed-forward layer: {_why(network, 0)}"
    )
    for number in sorted(chosen):
        refuse_unless(number in has, f"layer {number}: {_why(network, number)}")
        if _alone(network.layers[number].block):
            _check_pair(network, number, chosen)
    beside = [n for n in chosen if not _alone(network.layers[n].block)]
    network = network.without_dropout(beside)  # of the sum before, of each term after
    biased = {network.layers[n].block for n in chosen if _biased(network.layers[n].block, network.params(n))}
    parts: list[tuple[LayerBlock, Callable[[], Params]]] = []
    for number, at in enumerate(network.layers):
        params = partial(network.params, number)
        if number not in chosen:
            parts.append((at, params))
            continue
        bias = at.block in biased
        if _alone(at.block):
            before, first = parts.pop()
            block = _paired(before.block, at.block, bias)
            parts.append((replace(before, block=block), partial(_both, first, params, bias, broken)))
        else:
            parts.append((replace(at, block=_parallel(at.block, bias)), partial(_apart, params, bias, broken)))
    return from_parts(network, parts)


def _convertible(block: BlockConfig) -> bool:
    a = next((each for each in block.sublayers.values() if each.slots), None)
    return bool(a and wide_slots(a)) and block.layout in (PLACES if isinstance(a, SlotsConfig) else ("attention_only",))


def _why(network: Network, number: int) -> str:
    """Why the slots of a layer are no feed-forward layer."""
    block = network.layers[number].block
    slots = [each for each in block.sublayers.values() if each.slots]
    if not slots:
        return "there are no slots"
    if not any(wide_slots(each) for each in slots):
        return "slots in the softmax share its denominator with the context, and are no function f(x W_up + b) W_down"
    if names_of(block, "feed_forward"):
        return f"layout={block.layout!r} has a feed-forward layer already"
    return f"norm(x + a(x) + f(x)) of layout={block.layout!r}: no layout with a feed-forward layer has it"


def _check_pair(network: Network, number: int, chosen: set[int]) -> None:
    """Raises Refused if a layer with slots does not follow a layer that it can join."""
    where, at = f"layer {number}", network.layers[number]
    refuse_unless(number > 0, f"{where}: there is no layer before the slots")
    before = network.layers[number - 1].block
    refuse_unless(
        (before.layout, at.block.layout) in PAIRS and number - 1 not in chosen,
        f"{where}: the layer before the slots is no layer of layout={at.block.layout!r} with attention alone",
    )
    names = [each.name for each in fields(BlockConfig)]
    names.remove("layout")
    for name in [name for name in names if not (_bare(at.block) and name.startswith("norm"))]:
        ours, theirs = getattr(at.block, name), getattr(before, name)
        refuse_unless(
            ours == theirs, f"{where}: {name}={ours!r}, and {theirs!r} in the layer before: one block has one"
        )


def _alone(block: BlockConfig) -> bool:
    """Whether the slots of a layer are its only sublayer, not beside attention."""
    return isinstance(block.sublayers["attention"], SlotsConfig)


def _bare(block: BlockConfig) -> bool:
    """Whether a layer with slots has no norm."""
    return block.norm_at(f"attention_{PLACES[block.layout]}").kind == "none"


def _biased(block: BlockConfig, params: Params) -> bool:
    """Whether the feed-forward layer needs biases."""
    a = block.sublayers["attention"]
    own = isinstance(a, SlotsConfig) and "output" in a.bias
    return own or bool(params["attention/memory/bias"].any())


def _feed_forward(a: SoftmaxConfig | SlotsConfig, bias: bool) -> DenseConfig:
    return DenseConfig(kind=a.memory_activation, hidden=a.memory_slots, bias=bias)


def _parallel(block: BlockConfig, bias: bool) -> BlockConfig:
    a = options_of(block, "attention", SoftmaxConfig)
    names = tuple(name for name in a.bias if not (bias and name == "output"))
    new = replace(a, memory_slots=0, memory_activation="softmax", bias=names)
    return in_layout(block, "parallel", attention=new, feed_forward=_feed_forward(a, bias))


def _paired(before: BlockConfig, slots: BlockConfig, bias: bool) -> BlockConfig:
    layout, at = PAIRS[before.layout, slots.layout]
    new = in_layout(before, layout, feed_forward=_feed_forward(options_of(slots, "attention", SlotsConfig), bias))
    site = NormSite(kind="none") if _bare(slots) else getattr(slots.norms, f"attention_{at}")
    return with_values(new, {"norms": replace(new.norms, **{f"feed_forward_{at}": site})})


def _matrices(params: Params, bias: bool, broken: bool) -> Params:
    """The parameters of the feed-forward layer."""
    value_MD = params["attention/memory/value"]
    new = {"feed_forward/up/kernel": params["attention/memory/key"].T}
    new["feed_forward/down/kernel"] = value_MD[::-1] if broken else value_MD
    if bias:
        new["feed_forward/up/bias"] = params["attention/memory/bias"]
        new["feed_forward/down/bias"] = params.get("attention/output/bias", np.zeros(value_MD.shape[1]))
    return new


def _apart(params: Callable[[], Params], bias: bool, broken: bool) -> Params:
    """Attention and the feed-forward layer of slots beside it."""
    old = params()
    kept = {path: value for path, value in old.items() if not path.startswith("attention/memory/")}
    if bias:
        kept.pop("attention/output/bias", None)
    return kept | _matrices(old, bias, broken)


def _both(first: Callable[[], Params], params: Callable[[], Params], bias: bool, broken: bool) -> Params:
    """The parameters of the layer before, and the feed-forward layer with the norm of the slots."""
    old = params()
    norms = {path: value for path, value in old.items() if path.startswith("attention_norm_")}
    new = first() | {path.replace("attention", "feed_forward", 1): value for path, value in norms.items()}
    return new | _matrices(old, bias, broken)
