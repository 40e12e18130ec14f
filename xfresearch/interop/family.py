"""A family of Hugging Face models as data: how its config.json keys and tensor names map to our fields and parameters.

Each family is one file in this directory with one `Family`. In all its tables, `theirs` is the Hugging Face name and
`ours` the xfresearch name. A row gives the parameters that a tensor holds and the order of its dimensions, by the
letters of docs/glossary.md: 'D 3HK' is a matrix of shape [D, 3 x H x K], three matrices [D, H, K] side by side.
Import and export use the same row: it makes a view of the Hugging Face tensor with our dimensions, which import reads
and export writes.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from xfresearch.models.mixers.softmax.options import PROJECTIONS
from xfresearch.models.model_config import ModelConfig
from xfresearch.runtime.errors import UserError, shortened
from xfresearch.runtime.schema import is_number

REQUIRED = object()
MISSING = object()  # the value of a field that a model, or a kind of layer, does not have
ENCODER = "encoder"  # the name of the second stack
OF_ENCODER = f"stacks.{ENCODER}."  # in front of its fields
# Values of a key that turns the biases of all attention projections on or off.
BIASES = {False: (), True: PROJECTIONS}


class Unsupported(UserError):
    """A family cannot express a model, or our models cannot express a folder."""


@dataclass(frozen=True)
class Key:
    """A key of config.json and the field of ours that it sets: 'width', or '*.norm' for a field of every block, and with
    'stacks.encoder.' in front for a field of the encoder.

    default: the value that `transformers` uses if the key is missing, or if it is null and `null` is None.
    values: {Hugging Face name: our name}. read, write: conversions of numbers; `read` may raise Unsupported.
    alias: another name of the key, whose value wins if config.json has both. Export writes `theirs` alone.
    """

    theirs: str
    ours: str
    default: object = REQUIRED
    values: dict | None = None
    read: Callable = lambda value: value
    write: Callable = lambda value: value
    null: object = None
    alias: str = ""

    def from_config(self, config: dict):
        """The value of our field. Raises Unsupported if the key is missing or its value has no translation."""
        value = config.get(self.alias, config.get(self.theirs, self.default))
        if value is None:
            value = self.default if self.null is None else self.null
        if value is REQUIRED:
            raise Unsupported(f"config.json: {self.theirs} is missing")
        if self.values is None:
            return self.read(value)
        if value not in list(self.values):  # in a list, because the value may not be hashable
            raise Unsupported(
                f"config.json: {self.theirs}={value!r} is not allowed: it must be one of {_list(self.values)}"
            )
        return self.values[value]

    def to_config(self, value):
        """The value of the config.json key. None if ours has no translation: reading it back shows a difference."""
        if self.values is None:
            return self.write(value)
        return next((theirs for theirs, ours in self.values.items() if ours == value), None)


class Part(NamedTuple):
    """The slice of one of our parameters that a Hugging Face tensor, or a part of it, holds."""

    path: str  # 'blocks/main/attention/query/kernel'
    index: tuple[int, ...]  # type: ignore[assignment]  # in the leading dimensions: the layer in its stack, then the expert
    letters: str  # of the remaining dimensions
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorRow:
    """A Hugging Face tensor and the parameters that it holds. {layer} and {expert} in its name stand for numbers.

    dims: its dimensions, outermost first; each is a product of letters, outermost first. A digit n stands for n parts of
    equal size, in the order of `ours`. 'HK|GK D' has parts of different sizes one after another in the first dimension.
    paired: RoPE rotates dimension 2i of a head with 2i + 1, where ours rotates i with i + k/2.
    stack: the stack whose parameters these are, 'encoder' or '' for the decoder, which is the model itself.
    gated: it is of blocks whose feed-forward layer has a gate (True) or has none (False), if both have the same parameters.
    """

    theirs: str
    dims: str
    ours: tuple[str, ...]
    paired: bool = False
    stack: str = ""
    gated: bool | None = None

    def shape(self, parts: tuple[Part, ...]) -> tuple[int, ...]:
        """The Hugging Face tensor's shape."""
        shapes = [[math.prod(sizes[x] for x in group) for group in dims.split()] for dims, sizes in self._each(parts)]
        return sum(first for first, *_ in shapes) if "|" in self.dims else shapes[0][0], *shapes[0][1:]

    def view(self, tensor: np.ndarray, number: int, parts: tuple[Part, ...]) -> np.ndarray:
        """A view of part `number` of the Hugging Face `tensor`, with our dimensions."""
        each = self._each(parts)
        dims, sizes = each[number]
        if "|" in self.dims:
            rows = [math.prod(sizes[x] for x in dims.split()[0]) for dims, sizes in each]
            tensor = tensor[sum(rows[:number]) :][: rows[number]]
        order = dims.replace(" ", "")
        split = tensor.reshape([sizes[x] for x in order])
        digit = next((i for i, x in enumerate(order) if x.isdigit()), None)
        if digit is not None:
            split = np.moveaxis(split, digit, 0)[number]
            order = order[:digit] + order[digit + 1 :]
        return split.transpose([order.index(x) for x in self._letters(parts[number].letters)])

    def _each(self, parts: tuple[Part, ...]) -> list[tuple[str, dict[str, int]]]:
        """For each part, the dimensions of its place in the tensor, and the size of each letter."""
        first, *rest = self.dims.split()
        firsts = first.split("|") if "|" in first else [first] * len(parts)
        sizes = [dict(zip(self._letters(part.letters), part.shape, strict=True)) for part in parts]
        dims = [" ".join([each, *rest]) for each in firsts]
        return [(each, size | {str(len(parts)): len(parts)}) for each, size in zip(dims, sizes, strict=True)]

    def _letters(self, letters: str) -> str:
        """`letters` with H for G if the tensor holds queries, keys and values together, with as many heads each."""
        return letters if "G" in self.dims else letters.replace("G", "H")


def row(theirs: str, dims: str, *ours: str, paired: bool = False, gated: bool | None = None) -> TensorRow:
    return TensorRow(theirs, dims, ours, paired, gated=gated)


def of_encoder(rows: Iterable[TensorRow]) -> tuple[TensorRow, ...]:
    """Rows whose parameters are the encoder's."""
    return tuple(replace(each, stack=ENCODER) for each in rows)


def in_both(values: Mapping[str, object]) -> dict[str, object]:
    """Values of fields that the decoder and the encoder share."""
    return {**values, **{f"{OF_ENCODER}{name}": value for name, value in values.items()}}


def keys_of_both(*keys: Key) -> tuple[Key, ...]:
    """Keys that set a field of the decoder and the same field of the encoder."""
    return tuple(each for key in keys for each in (key, replace(key, ours=f"{OF_ENCODER}{key.ours}")))


def linear(theirs: str, ours: str, dims: str) -> tuple[TensorRow, TensorRow]:
    """The weight and bias of a torch Linear. `dims` are outputs, then inputs."""
    return row(f"{theirs}.weight", dims, f"{ours}/kernel"), row(f"{theirs}.bias", dims.split()[0], f"{ours}/bias")


def norm(theirs: str, ours: str, dims: str = "D") -> tuple[TensorRow, TensorRow]:
    """The gain and bias of a norm."""
    return row(f"{theirs}.weight", dims, f"{ours}/gain"), row(f"{theirs}.bias", dims, f"{ours}/bias")


class Rope(NamedTuple):
    """How a family's config.json gives RoPE: the dimensions that it rotates, as a fraction of a head or as a number, its
    base, and the scalings for longer contexts.

    With `by_type`, layers with full attention and sliding layers have a RoPE each, and scaling is that of full attention.
    """

    fraction: str = ""  # e.g. 'partial_rotary_factor'
    size: str = ""  # e.g. 'rotary_dim'
    default: float = 1.0  # the fraction if its key is missing
    size_default: int = 0  # the number of dimensions if its key is missing
    theta: str = "rope_theta"  # '' if the family has no such key: theta is theta_default, without scaling
    theta_default: float = 10_000.0
    scalings: tuple[str, ...] = ("default", "linear", "llama3", "yarn")  # values of rope_type
    scaling_default: dict = {}  # rope_scaling if config.json has none
    by_type: bool = False
    sliding_theta: str = ""  # with by_type, the key of the theta of sliding layers; '' if there is none
    sliding_theta_default: float = 10_000.0

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of config.json."""
        own = (self.fraction, self.size, self.theta, self.sliding_theta)
        return *own, "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"


class ByLayer(NamedTuple):
    """How a family's config.json gives the fields that differ between layers (by_layer.py)."""

    # (config.json, the fields that all layers share) -> for each layer, the name of its block and its own fields
    read: Callable[[dict, dict], list[tuple[str, dict]]]
    write: Callable[[list], dict]  # the block of each layer -> keys of config.json
    keys: tuple[str, ...]  # the keys of config.json that `read` reads


@dataclass(frozen=True)
class Family:
    name: str  # model_type in config.json
    architecture: str  # the class of `transformers` that reads it
    fixed: Mapping[str, object]  # values of our fields that all its models share
    keys: tuple[Key, ...]  # a later key overrides an earlier key of the same field
    rows: tuple[TensorRow, ...]
    rope: Rope | None = None
    by_layer: ByLayer | None = None
    needs: dict[str, object] = field(default_factory=dict)  # keys of config.json that must have this value
    same: dict[str, str] = field(default_factory=dict)  # keys that must have the value of another key
    derived: Callable[[dict], dict] = lambda config: {}  # fields of ours that depend on several keys
    without_effect: tuple[str, ...] = ()  # keys in config.json of its models that `transformers` does not read
    # Fields of ours that the tensors decide, not config.json, as functions of {name: StoredTensor}.
    of_tensors: Mapping[str, Callable[[dict], bool]] = field(default_factory=dict)
    # The shapes of tensors that are 0 in the folder of a model without these parameters.
    zeros: Mapping[str, Callable[[ModelConfig], tuple[int, ...]]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # name patterns of tensors that are not parameters (tables that the library computes)
    prefix: str = ""  # of most tensor names; some folders omit it
    same_tensors: Mapping[str, str] = field(default_factory=dict)  # {a copy, in some folders: the tensor that it equals}
    left_out: Mapping[str, str] = field(default_factory=dict)  # {pattern of names of tensors that are left out: their part}
    old_names: Mapping[str, str] = field(default_factory=dict)  # {end of a tensor's name in older folders: the present one}

    def present_name(self, name: str) -> str:
        """The name of a tensor in present folders."""
        for old, new in self.old_names.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        return name

    def shares(self, names: list[str]) -> tuple[float, float]:
        """The share of names of tensors that are a row's, with the prefix or without it, and that of rows that have one."""
        rows = [re.sub(r"\\{\w+\\}", r"\\d+", re.escape(row.theirs)) for row in self.rows]
        patterns = [re.compile(f"{row}|{row.removeprefix(re.escape(self.prefix))}") for row in rows]
        found = {(row, name) for row in patterns for name in names if row.fullmatch(self.present_name(name))}
        rows_of, names_of = map(set, zip(*found, strict=True)) if found else (set(), set())
        return len(names_of) / max(1, len(names)), len(rows_of) / len(rows)

    @property
    def two_stacks(self) -> bool:
        """Whether its models have an encoder."""
        return any(row.stack for row in self.rows)

    @property
    def reads(self) -> set[str]:
        """The keys of config.json that are read, and those that are known to have no effect."""
        names = {name for key in self.keys for name in (key.theirs, key.alias)}
        names |= {*self.needs, *self.same, *self.same.values(), *self.without_effect}
        names |= set(self.by_layer.keys) if self.by_layer else set()
        return names | (set(self.rope.keys) if self.rope else set())


def number(key: str, value) -> float:
    """The value of a config.json key as a float. Raises Unsupported if it is not a number."""
    if not is_number(value):
        raise Unsupported(f"config.json: {key}={shortened(repr(value))} has the wrong type: it must be a number")
    return float(value)


def count(key: str, value) -> int:
    """The value of a config.json key that is a count. Raises Unsupported if it is not an integer of at least 0."""
    if type(value) is not int or value < 0:
        raise Unsupported(f"config.json: {key}={value!r} is not allowed: it must be an integer of at least 0")
    return value


def _list(values) -> str:
    return ", ".join(repr(value) for value in sorted(values, key=str))
