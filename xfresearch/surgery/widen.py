"""widen: more heads, hidden units or slots, whose outputs are 0 at first (Chen et al. 2016; Gesmundo & Maile 2023).

    y = sum_h o_h W_O,h + sum_new o_h 0        f(x W_up + b) W_down = sum_f f_f W_down,f + sum_new f_f 0

New heads have drawn queries, keys and values and rows of 0 in W_O; new hidden units have drawn columns of W_up and rows
of 0 in W_down; new slots of the model's width have drawn keys and values of 0. The drawn numbers have the standard
deviation of the old ones, new biases are 0.

This needs outputs that do not depend on how many there are. ALiBi's slopes and a norm over all heads do, and so do the
softmax and SoLU over hidden units and slots in the softmax, where a new one takes weight from the others. Heads in the
residual stream, and heads that are parts of the input, cannot become more. The table of T5 has a column for each head and
is one for all layers: they are widened together, and its new columns are 0.

Groups of key-value heads keep their number of heads, so that there are more groups; a single key-value head for all heads
stays a single one.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.feed_forwards.dense import HiddenOptions
from xfresearch.models.mixers.memory_slots import softmax_slots
from xfresearch.models.mixers.slots import SlotsConfig
from xfresearch.models.mixers.softmax.config import Attending
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.options.fields import with_values
from xfresearch.sharding.letters import Axes
from xfresearch.surgery.key_value_groups import SPLIT
from xfresearch.surgery.network import ATTENDING, Network, Params, Target, inside
from xfresearch.surgery.refused import Refused, refuse_unless
from xfresearch.surgery.registry import conversion

T5_TABLE = "shared/relative_bias"  # [buckets, H] of all layers
Sizes = dict[tuple[str, str], tuple[int, int]]  # {(start of a path, letter): its size before and after}


@conversion(
    "more heads, hidden units or slots, whose outputs are 0",
    conditions="no output depends on the number of heads, hidden units or slots: no ALiBi, no norm over all heads, no "
    "softmax over hidden units or slots; heads with W_O",
    broken="with drawn outputs",
    roles=(*ATTENDING, "feed_forward"),
    options={
        "heads": "number of heads afterwards, 0 as before",
        "hidden": "hidden size afterwards, of each expert; 0 as before",
        "slots": "number of slots of the model's width afterwards, 0 as before",
        "seed": "seed of the drawn parameters",
    },
)
def widen(
    network: Network, sublayers: list[Target], broken: bool = False, heads=0, hidden=0, slots=0, seed=0
) -> Network:
    refuse_unless(heads or hidden or slots, "heads=0, hidden=0 and slots=0: nothing grows; give one of them")
    refuse_unless(seed >= 0, f"seed={seed} is below 0")
    mixers = _of(network, sublayers, ATTENDING) if heads or slots else []
    feed_forwards = _of(network, sublayers, ("feed_forward",)) if hidden else []
    for check, total, targets in (
        (_check_heads, heads, mixers),
        (_check_hidden, hidden, feed_forwards),
        (_check_slots, slots, mixers),
    ):
        for each in targets if total else ():
            check(each.options, total, each.where)
    axes = {each: inside(network.axes(each.number), each.name) for each in mixers + feed_forwards}

    def wider(target: Target[HiddenOptions | Attending | SlotsConfig]) -> SublayerConfig:
        options = target.options
        return with_hidden(options, hidden) if isinstance(options, HiddenOptions) else _with_more(options, heads, slots)

    def params(target: Target, old: Params) -> Params:
        sizes, random = _sizes(target.options, wider(target)), target.random(seed)
        return {path: _grown(path, value, axes[target][path], sizes, random, broken) for path, value in old.items()}

    outside = _with_t5_columns(network, mixers, heads) if heads else network
    return outside.change_each(mixers + feed_forwards, wider, params)


def _of(network: Network, sublayers: list[Target], roles: tuple[str, ...]) -> list[Target]:
    """Those with these roles. Raises Refused for a layer without one."""
    chosen = [each for each in sublayers if each.role in roles]
    for number in sorted({each.number for each in sublayers} - {each.number for each in chosen}):
        others = ", ".join(each.name for each in network.targets(roles, [number]))
        raise Refused(f"layer {number}: role leaves out {others}, which this size is of")
    return chosen


def _check_heads(a: SublayerConfig, heads: int, where: str) -> None:
    if not isinstance(a, Attending | SlotsConfig) or (isinstance(a, SlotsConfig) and not softmax_slots(a)):
        raise Refused(f"{where}: attention of kind {a.kind!r} has no heads of softmax attention")
    refuse_unless(heads > a.heads, f"{where}: heads={heads} is not above its {a.heads} heads")
    refuse_unless(a.output == "learned", f"{where}: output={a.output!r} has no rows of W_O that could be 0")
    for name in ("query", "key", "value"):
        kind = getattr(a, name, "learned")
        refuse_unless(kind not in SPLIT, f"{where}: {name}={kind!r} splits the input among the heads")
    refuse_unless(
        getattr(a, "position", "none") != "alibi", f"{where}: ALiBi's slopes 2^(-8 h / H) depend on the number H of heads"
    )
    over = getattr(a, "qk_norm_over", "head")
    refuse_unless(over != "heads", f"{where}: qk_norm_over='heads' divides by a mean square over all heads")
    refuse_unless(
        heads % _per_group(a) == 0,
        f"{where}: heads={heads} is no multiple of the {_per_group(a)} heads of each of its {a.kv_heads} key-value heads",
    )


def _per_group(a) -> int:
    """The number of heads of each key-value head, 1 if a single one serves any number of heads."""
    return a.heads // a.kv_heads if a.kv_heads > 1 else 1


def _check_hidden(options: HiddenOptions, hidden: int, where: str) -> None:
    kind = options.activation
    refuse_unless(
        ACTIVATIONS[kind].elementwise, f"{where}: {kind!r} is normalised over the hidden units: a new one changes the others"
    )
    refuse_unless(hidden > options.hidden, f"{where}: hidden={hidden} is not above its {options.hidden} hidden units")


def _check_slots(a: SublayerConfig, slots: int, where: str) -> None:
    refuse_unless(a.slots > 0, f"{where}: attention has no slots")
    refuse_unless(not softmax_slots(a), f"{where}: a new slot in the softmax takes weight from the others")
    refuse_unless(slots > a.slots, f"{where}: slots={slots} is not above its {a.slots} slots")


def _with_more(a: Attending | SlotsConfig, heads: int, slots: int) -> SublayerConfig:
    """A mixer with more heads or slots."""
    if heads:
        groups = 1 if a.kv_heads == 1 < a.heads else heads // _per_group(a)
        a = replace(a, heads=heads, kv_heads=groups)
    return replace(a, memory_slots=slots) if slots else a


def _sizes(before: SublayerConfig, after: SublayerConfig) -> Sizes:
    """The sizes of the dimensions that grow in a sublayer."""
    if isinstance(before, HiddenOptions) and isinstance(after, HiddenOptions):
        sizes = before.hidden, after.hidden
        shared = before.mixture.shared if before.mixture else 0
        changed = {(f"{part}/", "F"): sizes for part in ("up", "gate", "down", "experts")}
        changed["shared/", "F"] = sizes[0] * shared, sizes[1] * shared
    else:
        changed = {("", "H"): (getattr(before, "heads", 0), getattr(after, "heads", 0))}
        changed["memory/", "M"] = before.slots, after.slots
        each = getattr(before, "memory_heads", "each") == "each"
        for part in ("key", "value", *(["memory"] if each else [])):
            changed[f"{part}/", "G"] = getattr(before, "kv_heads", 0), getattr(after, "kv_heads", 0)
    return {key: sizes for key, sizes in changed.items() if sizes[0] != sizes[1]}


def with_hidden(options: HiddenOptions, hidden: int) -> HiddenOptions:
    """`options` with this hidden size, and with the defaults of the options that derive one from the model's width."""
    fields = options.__dataclass_fields__
    defaults = {name: each.default for name, each in fields.items() if name in ("hidden_factor", "gated_hidden")}
    return with_values(options, {"hidden": hidden} | defaults)


def _grown(path: str, array, axes: Axes, sizes: Sizes, random: np.random.Generator, broken: bool) -> np.ndarray:
    """`array` with more heads, groups, slots or hidden units at the end of their dimensions."""
    for (start, letter), (old, new) in sizes.items():
        axis = axes.letters.find(letter)
        if path.startswith(start) and axis >= 0:
            shape = [*array.shape[:axis], new - old, *array.shape[axis + 1 :]]
            if not axes.matrix:  # a shaped head with gains of 0 would never learn
                more = np.full(shape, float(path.startswith("shaping/")))
            elif axes.outputs == "D" and letter in axes.inputs and not broken:  # it writes the output of the sublayer
                more = np.zeros(shape)
            else:
                more = array.std() * random.normal(size=shape)
            array = np.concatenate([array, more], axis)
    return array


def _with_t5_columns(network: Network, mixers: list[Target], heads: int) -> Network:
    """The network with a column of T5's table for each new head."""
    layers = {each.number for each in mixers if getattr(each.options, "position", "") == "t5"}
    sharing = {
        number
        for number, at in enumerate(network.layers)
        if any(getattr(each, "position", "") == "t5" for each in at.block.sublayers.values())
    }
    if not layers:
        return network
    left = sharing - layers
    refuse_unless(
        not left, f"layer {min(left, default=0)}: its T5 table has a column for each head and is that of the layers to widen"
    )
    table_RH = network.outside[T5_TABLE]
    return network.with_outside({T5_TABLE: np.pad(table_RH, ((0, 0), (0, heads - table_RH.shape[1])))})
