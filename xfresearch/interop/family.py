"""A family of Hugging Face models as data: how its config.json keys and tensor names map to our fields and parameters.

Each family is one file in this directory with one `Family`. In all its tables, `theirs` is the Hugging Face name and
`ours` the xfresearch name. A row gives the parameters that a tensor holds and the order of its dimensions, by the
letters of docs/glossary.md: 'D 3HK' is a matrix of shape [D, 3 x H x K], three matrices [D, H, K] side by side.
Import and export use the same row: it makes a view of the Hugging Face tensor with our dimensions, which import reads
and export writes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xfresearch.errors import UserError
from xfresearch.models.mixers.softmax.options import PROJECTIONS

REQUIRED = object()
# Values of a key that turns the biases of all attention projections on or off.
BIASES = {False: (), True: PROJECTIONS}


class Unsupported(UserError):
    """A family cannot express a model, or our models cannot express a folder."""


@dataclass(frozen=True)
class Key:
    """A key of config.json and the field of ours that it sets: 'width', or '*.norm' for a field of every block.

    default: the value that `transformers` uses if the key is missing, or if it is null and `null` is None.
    values: {Hugging Face name: our name}. read, write: conversions of numbers; `read` may raise Unsupported.
    """

    theirs: str
    ours: str
    default: object = REQUIRED
    values: dict | None = None
    read: Callable = lambda value: value
    write: Callable = lambda value: value
    null: object = None

    def from_config(self, config: dict):
        """The value of our field. Raises Unsupported if the key is missing or its value has no translation."""
        value = config.get(self.theirs, self.default)
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


@dataclass(frozen=True)
class Row:
    """A Hugging Face tensor and the parameters that it holds. {layer} and {expert} in its name stand for numbers.

    dims: its dimensions, outermost first; each is a product of letters, outermost first. A digit n stands for n parts,
    in the order of `ours`.
    paired: RoPE rotates dimension 2i of a head with 2i + 1, where ours rotates i with i + k/2.
    """

    theirs: str
    dims: str
    ours: tuple[str, ...]
    paired: bool = False

    @property
    def parts(self) -> int:
        return len(self.ours)

    def shape(self, letters: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The Hugging Face tensor's shape, if each part has the dimensions `letters` and this `shape`."""
        return tuple(math.prod(self._sizes(letters, shape)[x] for x in group) for group in self.dims.split())

    def view(self, tensor: np.ndarray, part: int, letters: str, shape: tuple[int, ...]) -> np.ndarray:
        """A view of one part of the Hugging Face `tensor`, with our dimensions `letters`."""
        sizes = self._sizes(letters, shape)
        order = self.dims.replace(" ", "")
        split = tensor.reshape([sizes[x] for x in order])
        if self.parts > 1:
            at = next(i for i, x in enumerate(order) if x.isdigit())
            split = np.moveaxis(split, at, 0)[part]
            order = order[:at] + order[at + 1 :]
        return split.transpose([order.index(x) for x in self._letters(letters)])

    def _sizes(self, letters: str, shape: tuple[int, ...]) -> dict[str, int]:
        return dict(zip(self._letters(letters), shape, strict=True)) | {str(self.parts): self.parts}

    def _letters(self, letters: str) -> str:
        """`letters` with H for G if the tensor holds queries, keys and values together."""
        return letters if "G" in self.dims else letters.replace("G", "H")


def row(theirs: str, dims: str, *ours: str, paired: bool = False) -> Row:
    return Row(theirs, dims, ours, paired)


def linear(theirs: str, ours: str, dims: str) -> tuple[Row, Row]:
    """The weight and bias of a torch Linear. `dims` are outputs, then inputs."""
    return row(f"{theirs}.weight", dims, f"{ours}/kernel"), row(f"{theirs}.bias", dims.split()[0], f"{ours}/bias")


def norm(theirs: str, ours: str, dims: str = "D") -> tuple[Row, Row]:
    """The gain and bias of a norm."""
    return row(f"{theirs}.weight", dims, f"{ours}/gain"), row(f"{theirs}.bias", dims, f"{ours}/bias")


class Rope(NamedTuple):
    """How a family's config.json gives the dimensions that RoPE rotates: as a fraction of a head or as a number."""

    fraction: str = ""  # e.g. 'partial_rotary_factor'
    size: str = ""  # e.g. 'rotary_dim'
    default: float = 1.0  # the fraction if its key is missing
    size_default: int = 0  # the number of dimensions if its key is missing
    theta: str = "rope_theta"  # '' if the family has no such key: theta is theta_default, without scaling
    theta_default: float = 10_000.0


class Windows(NamedTuple):
    """How a family's config.json gives the attention window of each layer."""

    read: Callable[[dict], list[int]]  # config.json -> the window of each layer, 0 for full attention
    write: Callable[[list[int]], dict]  # the inverse


@dataclass(frozen=True)
class Family:
    name: str  # model_type in config.json
    architecture: str  # the class of `transformers` that reads it
    fixed: dict[str, object]  # values of our fields that all its models share
    keys: tuple[Key, ...]  # a later key overrides an earlier key of the same field
    rows: tuple[Row, ...]
    rope: Rope | None = None
    windows: Windows | None = None
    needs: dict[str, object] = field(default_factory=dict)  # keys of config.json that must have this value
    same: dict[str, str] = field(default_factory=dict)  # keys that must have the value of another key
    derived: Callable[[dict], dict] = lambda config: {}  # fields of ours that depend on several keys
    ignored: tuple[str, ...] = ()  # name patterns of tensors that are not parameters (tables that the library computes)
    prefix: str = ""  # of most tensor names; some folders omit it


def number(key: str, value) -> float:
    """The value of a config.json key as a float. Raises Unsupported if it is not a number."""
    if type(value) not in (int, float):
        raise Unsupported(f"config.json: {key}={value!r} has the wrong type: it must be a number")
    return float(value)


def count(key: str, value) -> int:
    """The value of a config.json key that is a count. Raises Unsupported if it is not an integer of at least 0."""
    if type(value) is not int or value < 0:
        raise Unsupported(f"config.json: {key}={value!r} is not allowed: it must be an integer of at least 0")
    return value


def _list(values) -> str:
    return ", ".join(repr(value) for value in sorted(values, key=str))
