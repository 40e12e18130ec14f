"""The options of softmax attention: derived sizes, and checks of combinations."""

from dataclasses import dataclass, replace
from typing import TypeVar

from xfresearch.models.mixers.memory_slots import slot_values, wide_slots
from xfresearch.models.mixers.softmax.options import (
    PROJECTIONS,
    AttendOptions,
    MemoryOptions,
    OutputOptions,
    PositionOptions,
    ProjectOptions,
    RopeConfig,
    WeightOptions,
)
from xfresearch.models.mixers.softmax.projections import head_sizes, matrices
from xfresearch.models.place import Place
from xfresearch.models.positions import IN_ATTENTION
from xfresearch.models.sublayer import MemoryPart, SublayerConfig
from xfresearch.options.fields import changed, option
from xfresearch.runtime.errors import require

A = TypeVar("A", bound="Attending")


PAST = {"sees_itself": True, "window": 0, "span": "full"}  # values of options that otherwise count past tokens


@dataclass(frozen=True)
class Kind(SublayerConfig):
    kind: str = option("softmax", "kind of mixer")


@dataclass(frozen=True)
class Attending(OutputOptions, MemoryOptions, WeightOptions, ProjectOptions, Kind):
    """The options of softmax attention to anything: to the sequence itself, or to a source (cross.py)."""

    @property
    def random(self) -> bool:
        return self.dropout > 0

    @property
    def words(self) -> str:
        slots = [f"{self.memory_slots} memory slots"] if self.memory_slots else []
        biases = ["biases"] if self.bias else []
        return ", ".join([heads_in_words(self), *slots, *biases, *changed(self, *HEAD_OPTIONS, "memory_slots", "bias")])

    @property
    def norm_kinds(self) -> tuple[str, ...]:
        return (self.qk_norm,)

    @property
    def memory_parts(self) -> dict[str, MemoryPart]:
        return {"": slot_values(self)} if self.memory_slots else {}

    @property
    def slots(self) -> int:
        return self.memory_slots

    @property
    def attends(self) -> bool:
        return True

    @property
    def sinks(self) -> bool:
        return self.sink != "none"

    @property
    def identities(self) -> dict[str, str]:
        given = {name: getattr(self, name) for name in PROJECTIONS}
        return {name: kind for name, kind in given.items() if kind.startswith("identity")}

    @property
    def both_sides(self) -> tuple[str, ...]:
        return ("query",) if self.query == "merged" and not self.rank else ()

    @property
    def bias_places(self) -> tuple[str, ...]:
        return (*PROJECTIONS, *(["memory"] if wide_slots(self) else []))

    def with_biases(self, parts: set[str]) -> "Attending":
        return replace(self, bias=tuple(name for name in PROJECTIONS if name in {*self.bias, *parts}))

    def projected(self: A, place: Place, key: str) -> A:
        """The options with the sizes of the projections, and checks of these."""
        a = with_sizes(self, place.width, key)
        full = min(place.width, place.read_width)
        require(a.rank <= full, f"{key}.rank", a.rank, f"at most model.width={full}, the full rank")
        if a.query == "merged":  # one matrix replaces those of queries and of keys
            allowed = "left at 'learned' with query='merged', which replaces both matrices"
            require(a.key in ("learned", "identity_whole"), f"{key}.key", a.key, allowed)
            a = replace(a, key="learned" if a.rank else "identity_whole")
        if place.bare:  # the feed-forward reads the heads
            allowed = "'softmax' with a layout whose feed-forward reads the heads"
            require(not wide_slots(a), f"{key}.memory_activation", a.memory_activation, allowed)
            a = replace(a, output="identity")
        a = replace(a, bias=in_order(a.bias, tuple(matrices(replace(place, options=a))), key))
        _check_identities(a, place, key)
        return a


@dataclass(frozen=True)
class SoftmaxConfig(AttendOptions, PositionOptions, Attending):
    @property
    def without_prefix(self) -> str:
        for name, value in PAST.items():
            if getattr(self, name) != value:
                return f"{name}={getattr(self, name)!r} counts past tokens"
        if self.position in ("t5", "relative_key"):
            return f"position={self.position!r} is of distances to past tokens"
        return ""

    def resolved(self, place: Place, key: str) -> "SoftmaxConfig":
        a = self.projected(place, key)
        _check_positions(a, place.width, key)
        _check_shaping(a, key)
        _check_reach(a, place, key)
        return a


HEAD_OPTIONS = ("kind", "heads", "head_size", "kv_heads", "position")  # those that `heads_in_words` names


def heads_in_words(a, name: str = "heads") -> str:
    """'8 heads of 64 on 2 key-value heads with RoPE'."""
    groups = f" on {a.kv_heads} key-value heads" if a.kv_heads != a.heads else ""
    position = IN_ATTENTION[a.position].title
    return f"{a.heads} {name} of {a.head_size}{groups}{position and f' with {position}'}"


def with_sizes(a, width: int, key: str):
    """`a` with the size of a head and the number of key-value heads filled in."""
    if not a.head_size:
        require(width % a.heads == 0, f"{key}.heads", a.heads, f"a divisor of model.width={width}, or set head_size")
        a = replace(a, head_size=width // a.heads)
    a = replace(a, kv_heads=a.kv_heads or a.heads)
    require(a.heads % a.kv_heads == 0, f"{key}.kv_heads", a.kv_heads, f"a divisor of attention.heads={a.heads}")
    return a


def in_order(bias: tuple[str, ...], projections: tuple[str, ...], key: str) -> tuple[str, ...]:
    """`bias` in the order of the learned projections. Raises UserError for any other name."""
    allowed = f"names of learned projections: {', '.join(projections)}"
    require(set(bias) <= set(projections), f"{key}.bias", bias, allowed)
    return tuple(name for name in projections if name in bias)


def _check_identities(a: Attending, place: Place, key: str) -> None:
    """Raises UserError if an identity splits the input among the heads and the sizes do not match."""
    width, read = place.width, place.read_width
    sizes = head_sizes(a, width, read)
    shares = [("query", a.query, a.heads, sizes.qk, width), ("key", a.key, a.kv_heads, sizes.qk, read)]
    for name, kind, heads, size, whole in [*shares, ("value", a.value, a.kv_heads, sizes.v, read)]:
        of = "model.width" if name == "query" or not place.source_width else "the width of the source"
        allowed = f"{kind!r} only if heads * size = {of}={whole}, here {heads} * {size}"
        split = kind in ("identity", "identity_plus")
        require(not split or heads * size == whole, f"{key}.{name}", kind, allowed)
    both = a.query == a.key == "identity_whole"
    allowed = f"another value: the keys are the source of width {read}, the queries the input of width {width}"
    require(not both or width == read, f"{key}.query", a.query, allowed)
    allowed = f"'identity' only if heads * size of a value = model.width={width}, here {a.heads} * {sizes.v}"
    whole = a.heads * sizes.v == width
    require(place.bare or a.output != "identity" or whole, f"{key}.output", a.output, allowed)


def _check_positions(a: SoftmaxConfig, width: int, key: str) -> None:
    allowed = "another value with query='merged', which has no separate queries and keys that RoPE could rotate"
    require(a.query != "merged" or a.position != "rope", f"{key}.position", a.position, allowed)
    if a.position == "rope":
        check_rope(a.rope, head_sizes(a, width).qk, f"{key}.rope")
    allowed = f"above t5_buckets / 2 = {a.t5_buckets // 2}, where buckets of more than one distance start"
    require(a.position != "t5" or a.t5_distance > a.t5_buckets // 2, f"{key}.t5_distance", a.t5_distance, allowed)


def rotary_size(size: int, fraction: float) -> int:
    """The number of dimensions that RoPE rotates in a head of `size`."""
    return int(size * fraction + 1e-6)


def check_rope(rope: RopeConfig, size: int, key: str) -> None:
    """Raises UserError if queries of `size` dimensions cannot be rotated with these options."""
    rotary = rotary_size(size, rope.fraction)
    allowed = f"a share of a query's {size} dimensions that is an even number of them, at least 2"
    require(rotary >= 2 and rotary % 2 == 0, f"{key}.fraction", rope.fraction, allowed)
    low, high = rope.low_frequency, rope.high_frequency
    yarn = rope.scaling == "yarn"
    require(high > low, f"{key}.high_frequency", high, f"above rope.low_frequency={low}")
    require(not yarn or low > 0, f"{key}.low_frequency", low, "above 0 with rope.scaling='yarn'")
    require(not yarn or rope.theta > 1, f"{key}.theta", rope.theta, "above 1 with rope.scaling='yarn'")


def _check_shaping(a: SoftmaxConfig, key: str) -> None:
    """Raises UserError if the initial weights of shaped attention would not be the identity, with A = C (He & Hofmann
    2023)."""
    allowed = (
        "'none' with memory_slots, a window, an adaptive span or sees_itself=False: I and C are over the whole context"
    )
    whole = not a.memory_slots and not a.window and a.span == "full" and a.sees_itself
    require(a.shaping == "none" or whole, f"{key}.shaping", a.shaping, allowed)
    allowed = "'none' or 'skip_init' unless query has a matrix and position is not 'alibi': initially A is not C then"
    uniform = not a.query.startswith("identity") and a.position != "alibi"
    require(a.shaping != "shaped" or uniform, f"{key}.shaping", a.shaping, allowed)


def _check_reach(a: SoftmaxConfig, place: Place, key: str) -> None:
    """Raises UserError for options that count past tokens in a model that is not causal, or without a known length."""
    for name, value in PAST.items():
        given = getattr(a, name)
        allowed = f"{value!r} with model.causal=False: it counts past tokens"
        require(place.causal or given == value, f"{key}.{name}", given, allowed)
    allowed = "another value with model.causal=False: relative keys are of distances to past tokens"
    require(place.causal or a.position != "relative_key", f"{key}.position", a.position, allowed)
    counted = a.position == "relative_key" or a.span == "adaptive"
    allowed = f"at least 1 if {key} has a relative key or an adaptive span but no window: they cover that length"
    require(not counted or bool(a.window or place.max_length), "model.max_length", place.max_length, allowed)


def longest(a: SoftmaxConfig, max_length: int) -> int:
    """The number of tokens that attention can reach."""
    return a.window or max_length
