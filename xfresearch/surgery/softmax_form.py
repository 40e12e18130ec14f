"""feed_forward_to_memory with form='softmax': an approximate start for slots in the softmax of the heads.

    f(x W_up + b) W_down + c        becomes        sum_h softmax_h([scale q_h k_s, scale q_h k_m]) [v_s, v_m] W_O,h

Head h gets M = F / H of the hidden units as slots, with the key and the value nearest to them, in least squares:

    scale W_Q,h k_m = column m of W_up        v_m W_O,h = row m of W_down

This computes another function: the softmax divides the coefficients by a sum over slots and context, it is not f, b is
lost, and the norm of the feed-forward layer is that of attention. So it is only a start for training (Sukhbaatar et al.
2019 train such a model from random slots).
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.feed_forwards.dense import DenseConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.surgery.biases import add_bias
from xfresearch.surgery.network import Network, Params, in_layout, inside, options_of, put
from xfresearch.surgery.refused import refuse_unless, required
from xfresearch.surgery.sinks import with_slots


def to_softmax(network: Network, layers, layouts: dict[str, str], broken: bool) -> Network:
    """The network with the feed-forward layers of `layers` as slots in the softmax. `layouts` maps the layout of a block
    to that with one sublayer."""
    for number in layers:
        _check(network.layers[number].block, f"layer {number}")
    width = network.model.width
    return network.change(
        layers,
        lambda block: _block(block, layouts[block.layout]),
        lambda number, block, params: _params(block, params, width, broken),
    )


def _check(block: BlockConfig, where: str) -> None:
    mixer, hidden = block.sublayers["attention"], options_of(block, "feed_forward", DenseConfig).hidden
    a = required(mixer, SoftmaxConfig, f"{where}: a mixer of kind {mixer.kind!r} has no softmax with slots")
    check_slots(a, where)
    for name in ("query", "output"):
        given = getattr(a, name)
        refuse_unless(given == "learned", f"{where}: {name}={given!r} is no matrix for which a slot could be solved")
    refuse_unless(a.kv_heads == a.heads, f"{where}: heads of a group share their slots (expand_groups first)")
    refuse_unless(hidden % a.heads == 0, f"{where}: {hidden} hidden units do not divide among {a.heads} heads")


def check_slots(a: SoftmaxConfig, where: str) -> None:
    """Raises Refused if attention has slots already, or cannot have any."""
    refuse_unless(not a.memory_slots, f"{where}: attention has {a.memory_slots} slots already")
    for name, value in (("sink", a.sink if a.sink == "learned" else "none"), ("shaping", a.shaping)):
        refuse_unless(value == "none", f"{where}: attention with {name}={value!r} has no slots in this project")


def _block(block: BlockConfig, layout: str) -> BlockConfig:
    f, a = options_of(block, "feed_forward", DenseConfig), options_of(block, "attention", SoftmaxConfig)
    bias = a.bias if not f.bias or "output" in a.bias else (*a.bias, "output")
    return in_layout(block, layout, attention=replace(a, memory_slots=f.hidden // a.heads, bias=bias))


def _params(block: BlockConfig, params: Params, width: int, broken: bool) -> Params:
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
