"""feed_forward_to_memory: a feed-forward layer becomes slots of the model's width (Sukhbaatar et al. 2019, sec. 3).

    f(x W_up + b) W_down + c  =  f(x k^T + b) v + c        k = W_up^T, v = W_down

The columns of W_up are the keys, the rows of W_down are the values. This is exact for an activation f that acts on each
hidden unit alone, without a gate: f(x W_gate) * (x W_up) has two keys per value. Where the slots are depends on the layout:

    parallel           x + a(n) + f(n)                  attention_only, with the slots beside attention; c goes to b_O
    pre_norm           x + a(norm(x)), then             two layers attention_only: attention, and slots with a norm of
                       x + f(norm'(x))                  their own
    no_norm_between    the same without norm'           the same, with norm 'none'
    post_norm          norm(x + a(x)), then             two layers all_attention
                       norm'(x + f(x))
    cross_post_norm    the same with norm(x + c(x, s))  a layer cross_all_attention, and one all_attention
                       between the two

`memory_to_feed_forward` is the inverse. form='softmax' puts the slots into the softmax of the heads instead, where they are
an approximate start for training:

    f(x W_up + b) W_down + c        becomes        sum_h softmax_h([scale q_h k_s, scale q_h k_m]) [v_s, v_m] W_O,h

Head h gets M = F / H of the hidden units as slots, with the key and the value nearest to them, in least squares:

    scale W_Q,h k_m = column m of W_up        v_m W_O,h = row m of W_down

This computes another function: the softmax divides the coefficients by a sum over slots and context, it is not f, b is
lost, and the norm of the feed-forward layer is that of attention. So it is only a start for training (Sukhbaatar et al.
2019 train such a model from random slots).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from xfresearch.models.block_config import BlockConfig, NormSite
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.feed_forwards.dense import DenseConfig
from xfresearch.models.mixers.slots import SlotsConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.options.fields import with_values
from xfresearch.surgery.biases import add_bias
from xfresearch.surgery.layer_blocks import LayerBlock
from xfresearch.surgery.network import Network, Params, Target, in_layout, inside, names_of, options_of, put
from xfresearch.surgery.refused import refuse_unless, required
from xfresearch.surgery.registry import conversion
from xfresearch.surgery.sinks import with_slots

Form = Literal["elementwise", "softmax"]
BESIDE = {"parallel": "attention_only"}  # layout: the layout with slots beside attention
PAIRS = {  # layout: those of the layer with attention and of the layer with slots, and the place of the norm
    "pre_norm": ("attention_only", "attention_only", "in"),
    "no_norm_between": ("attention_only", "attention_only", "in"),
    "post_norm": ("all_attention", "all_attention", "post"),
    "cross_post_norm": ("cross_all_attention", "all_attention", "post"),
}
LAYOUT = BESIDE | {name: layout for name, (layout, *_) in PAIRS.items()}
ONE_NORM = "attention and slots beside it read the same norm(x), and W_up reads another"
OUTPUT_NORM = "x + norm(f(x)): no layout of one sublayer has a norm of the output"
NO_SKIP = "f(a(x)): no layout of one sublayer is without a skip"
BOTH = "x + f(a(x)): the skip goes around both sublayers"
REASONS = {
    "parallel_two_norms": ONE_NORM,
    "peri_norm": OUTPUT_NORM,
    "sandwich_norm": OUTPUT_NORM,
    "output_norm": OUTPUT_NORM,
    "no_skip": NO_SKIP,
    "skipless": NO_SKIP,
    "skipless_parallel": NO_SKIP,
    "fused_output": BOTH,
    "no_residual_between": BOTH,
    "deep_norm": "norm(alpha x + f(x)): no layout of one sublayer has the factor alpha",
    "macaron": "x + f(x) / 2: no layout of one sublayer has the factor 1/2",
    "resi_dual": "no layout of one sublayer has a second stream",
    "cross_pre_norm": "x + c(norm(x), source): no layout has it without a feed-forward layer",
}


@conversion(
    "an elementwise feed-forward layer as slots of the model's width, beside attention or as a layer",
    conditions="an elementwise activation without a gate, in the layouts parallel, pre_norm, no_norm_between, "
    "post_norm or cross_post_norm",
    broken="with the values of the slots in reverse order",
    approximate=lambda form: form == "softmax",
    options={
        "form": "elementwise: slots with the activation, exact; softmax: slots in the softmax, only a start for training"
    },
)
def feed_forward_to_memory(network: Network, layers, broken: bool = False, form: Form = "elementwise") -> Network:
    whole = len(layers) == len(network.layers)
    has = {n for n, at in enumerate(network.layers) if names_of(at.block, "feed_forward")}
    chosen = has & {*layers} if whole else {*layers}
    refuse_unless(bool(chosen), "no layer has a feed-forward layer")
    for number in sorted(chosen):
        refuse_unless(number in has, f"layer {number}: there is no feed-forward layer")
        for each in network.targets(("feed_forward",), [number]):
            _check(each, network.layers[number].block.layout)
    if form == "softmax":
        return _to_softmax(network, chosen, LAYOUT, broken)
    for number in sorted(chosen):
        _check_beside(network.layers[number].block, network.params(number), f"layer {number}")
    network = network.without_dropout(n for n in chosen if network.layers[n].block.layout in BESIDE)  # of each, then of both
    parts: list[tuple[LayerBlock, Callable[[], Params]]] = []
    for number, at in enumerate(network.layers):
        params = partial(network.params, number)
        if number not in chosen:
            parts.append((at, params))
        elif at.block.layout in BESIDE:
            parts.append((replace(at, block=_beside(at.block)), partial(_with_slots, at.block, params, broken)))
        else:
            attention, slots = _pair(at.block)
            parts.append((replace(at, block=attention), partial(_alone, params)))
            parts.append((LayerBlock(f"{at.name}_memory", slots), partial(_slots, params, broken)))
    return from_parts(network, parts)


def from_parts(network: Network, parts: list[tuple[LayerBlock, Callable[[], Params]]]) -> Network:
    """The network with other layers, each with its block and a function that makes its parameters."""
    same = _numbered([at.block for at in network.layers]) == _numbered([at.block for at, _ in parts])
    refuse_unless(same, "lambda_0 of a differential layer depends on its number, which would change")
    return replace(network, layers=tuple(at for at, _ in parts), params=lambda number: parts[number][1]())


def _numbered(blocks: list[BlockConfig]) -> list[int]:
    """The numbers of the layers that depend on their number."""
    return [number for number, block in enumerate(blocks) if any(each.numbered for each in block.sublayers.values())]


def _check(target: Target, layout: str) -> None:
    f, where = target.options, target.where
    refuse_unless(isinstance(f, DenseConfig), f"{where}: {f.kind!r}: a router chooses experts, and slots have none")
    activation = ACTIVATIONS[f.kind]
    refuse_unless(not activation.gated, f"{where}: {f.kind!r}: f(x W_gate) * (x W_up) has two keys per value")
    refuse_unless(activation.elementwise, f"{where}: {f.kind!r} is not elementwise: f sees all hidden units together")
    known = layout in BESIDE or layout in PAIRS
    refuse_unless(known, f"{where}: layout={layout!r}, {REASONS.get(layout, 'which no layout with slots can replace')}")


def _check_beside(block: BlockConfig, params: Params, where: str) -> None:
    """Raises Refused if attention has no place for the slots of a parallel feed-forward layer."""
    if block.layout not in BESIDE:
        return
    mixer = block.sublayers["attention"]
    reason = f"{where}: a mixer of kind {mixer.kind!r} has no slots of the model's width beside it"
    a = required(mixer, SoftmaxConfig, reason)
    _check_slots(a, where)
    biased = params.get("feed_forward/down/bias", np.zeros(1)).any()
    refuse_unless(not biased or a.output == "learned", f"{where}: c has no place: output={a.output!r} has no bias")


def _beside(block: BlockConfig) -> BlockConfig:
    """The block with slots beside attention."""
    f, a = options_of(block, "feed_forward", DenseConfig), options_of(block, "attention", SoftmaxConfig)
    moved = f.bias and a.output == "learned" and "output" not in a.bias
    bias = (*a.bias, "output") if moved else a.bias
    a = replace(a, memory_slots=f.hidden, memory_activation=f.kind, bias=bias)
    return in_layout(block, BESIDE[block.layout], attention=a)


def _pair(block: BlockConfig) -> tuple[BlockConfig, BlockConfig]:
    """The block of the attention layer, and that of the layer with slots."""
    layout, of_slots, at = PAIRS[block.layout]
    f = options_of(block, "feed_forward", DenseConfig)
    slots = SlotsConfig(memory_slots=f.hidden, memory_activation=f.kind, bias=("output",) if f.bias else ())
    own = getattr(block.norms, f"feed_forward_{at}", NormSite(kind="none"))
    alone = in_layout(block, of_slots, attention=slots)
    return in_layout(block, layout), with_values(alone, {"norms": replace(alone.norms, **{f"attention_{at}": own})})


def _memory(params: Params, broken: bool) -> Params:
    up_DF, down_FD = params["feed_forward/up/kernel"], params["feed_forward/down/kernel"]
    return {
        "attention/memory/key": up_DF.T,
        "attention/memory/bias": params.get("feed_forward/up/bias", np.zeros(up_DF.shape[1])),
        "attention/memory/value": down_FD[::-1] if broken else down_FD,
    }


def _attention(params: Params) -> Params:
    return {path: value for path, value in params.items() if not path.startswith("feed_forward")}


def _alone(params: Callable[[], Params]) -> Params:
    """Attention alone."""
    return _attention(params())


def _with_slots(block: BlockConfig, params: Callable[[], Params], broken: bool) -> Params:
    """Attention with the slots beside it."""
    old = params()
    new = _attention(old) | _memory(old, broken)
    f, a = options_of(block, "feed_forward", DenseConfig), options_of(block, "attention", SoftmaxConfig)
    if f.bias and a.output == "learned":
        add_bias(new, "attention/output/bias", old["feed_forward/down/bias"])
    return new


def _slots(params: Callable[[], Params], broken: bool) -> Params:
    """The slots as a layer of their own, with the norm of the feed-forward layer."""
    old = params()
    new = _memory(old, broken)
    if "feed_forward/down/bias" in old:
        new["attention/output/bias"] = old["feed_forward/down/bias"]
    norms = {path: value for path, value in old.items() if path.startswith("feed_forward_norm_")}
    return new | {path.replace("feed_forward", "attention", 1): value for path, value in norms.items()}


def _to_softmax(network: Network, layers, layouts: dict[str, str], broken: bool) -> Network:
    """The network with the feed-forward layers of `layers` as slots in the softmax. `layouts` maps the layout of a block
    to that with one sublayer."""
    for number in layers:
        _check_softmax(network.layers[number].block, f"layer {number}")
    width = network.model.width
    return network.change(
        layers,
        lambda block: _softmax_block(block, layouts[block.layout]),
        lambda number, block, params: _softmax_params(block, params, width, broken),
    )


def _check_softmax(block: BlockConfig, where: str) -> None:
    mixer, hidden = block.sublayers["attention"], options_of(block, "feed_forward", DenseConfig).hidden
    a = required(mixer, SoftmaxConfig, f"{where}: a mixer of kind {mixer.kind!r} has no softmax with slots")
    _check_slots(a, where)
    for name in ("query", "output"):
        given = getattr(a, name)
        refuse_unless(given == "learned", f"{where}: {name}={given!r} is no matrix for which a slot could be solved")
    refuse_unless(a.kv_heads == a.heads, f"{where}: heads of a group share their slots (expand_groups first)")
    refuse_unless(hidden % a.heads == 0, f"{where}: {hidden} hidden units do not divide among {a.heads} heads")


def _check_slots(a: SoftmaxConfig, where: str) -> None:
    """Raises Refused if attention has slots already, or cannot have any."""
    refuse_unless(not a.memory_slots, f"{where}: attention has {a.memory_slots} slots already")
    for name, value in (("sink", a.sink if a.sink == "learned" else "none"), ("shaping", a.shaping)):
        refuse_unless(value == "none", f"{where}: attention with {name}={value!r} has no slots in this project")


def _softmax_block(block: BlockConfig, layout: str) -> BlockConfig:
    f, a = options_of(block, "feed_forward", DenseConfig), options_of(block, "attention", SoftmaxConfig)
    bias = a.bias if not f.bias or "output" in a.bias else (*a.bias, "output")
    return in_layout(block, layout, attention=replace(a, memory_slots=f.hidden // a.heads, bias=bias))


def _softmax_params(block: BlockConfig, params: Params, width: int, broken: bool) -> Params:
    a = options_of(block, "attention", SoftmaxConfig)
    f, new = inside(params, "feed_forward"), inside(params, "attention")
    up_DHM = f["up/kernel"].reshape(width, a.heads, -1)
    down_HMD = f["down/kernel"].reshape(a.heads, -1, width)
    query_HDK = new["query/kernel"].swapaxes(0, 1)
    key_HKM = np.linalg.pinv(query_HDK) @ up_DHM.swapaxes(0, 1) / logit_scale(a, width)
    value_HMV = down_HMD @ np.linalg.pinv(new["output/kernel"])
    value_HMV = value_HMV[:, ::-1] if broken else value_HMV
    if "down/bias" in f:
        add_bias(new, "output/bias", f["down/bias"])
    slots = key_HKM.transpose(2, 0, 1), value_HMV.swapaxes(0, 1)
    others = {path: value for path, value in params.items() if not path.startswith("feed_forward")}
    return put(others, "attention", with_slots(new, slots))
