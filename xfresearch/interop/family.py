"""What a family of Hugging Face models is, as data: keys of its config.json and names of its tensors, set against ours.

Each family is one file beside this one with one `Family`. A row says which of our parameters a tensor holds and how its
dimensions follow each other, by the letters of models/axes.py: 'D 3HK' is a matrix whose rows are the width and whose
columns are three parts one after the other, each of heads times their size. The same row serves both ways: it makes a view
of their tensor that has our dimensions, which import reads and export writes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xfresearch.errors import UserError
from xfresearch.models.mixers.softmax.options import PROJECTIONS

REQUIRED = object()
# For a key that says whether all of attention's projections have a bias.
BIASES = {False: (), True: PROJECTIONS}


class Refused(UserError):
    """A family cannot express a model, or a folder holds what our models do not have."""


@dataclass(frozen=True)
class Key:
    """A key of config.json and the field of ours that it sets: 'width', or '*.norm' for a field of every block.

    `default` is what the library takes where the key is missing, and where it is null unless `null` says otherwise;
    `values` translates names, theirs first; `read` and `write` translate numbers, `read` with Refused for what it cannot.
    """

    theirs: str
    ours: str
    default: object = REQUIRED
    values: dict | None = None
    read: Callable = lambda value: value
    write: Callable = lambda value: value
    null: object = None

    def from_config(self, config: dict):
        """The value of our field. Refused where the key is missing, or its value has no translation."""
        value = config.get(self.theirs, self.default)
        if value is None:
            value = self.default if self.null is None else self.null
        if value is REQUIRED:
            raise Refused(f"config.json: {self.theirs} is missing")
        if self.values is None:
            return self.read(value)
        if value not in list(self.values):  # a list may be compared, though not looked up
            raise Refused(
                f"config.json: {self.theirs}={value!r} is not allowed: it must be one of {_list(self.values)}"
            )
        return self.values[value]

    def to_config(self, value):
        """The value of their key; None where ours has no translation, so that it is another one once read again."""
        if self.values is None:
            return self.write(value)
        return next((theirs for theirs, ours in self.values.items() if ours == value), None)


@dataclass(frozen=True)
class Row:
    """A tensor of theirs and the parameters that it holds: `dims` are its dimensions, each a product of letters, outermost
    first; a digit is as many parts, `ours` in order. {layer} and {expert} in the name are numbers.

    paired: their RoPE turns dimension 2i of a head with 2i + 1, where ours turns i with i + k/2.
    """

    theirs: str
    dims: str
    ours: tuple[str, ...]
    paired: bool = False

    @property
    def parts(self) -> int:
        return len(self.ours)

    def shape(self, letters: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Their tensor's shape, where one part of ours has the dimensions `letters` and this `shape`."""
        return tuple(math.prod(self._sizes(letters, shape)[x] for x in group) for group in self.dims.split())

    def view(self, tensor: np.ndarray, part: int, letters: str, shape: tuple[int, ...]) -> np.ndarray:
        """Part of their `tensor` with our dimensions `letters`, sharing its memory."""
        letters, sizes, order = self._letters(letters), self._sizes(letters, shape), self.dims.replace(" ", "")
        split = tensor.reshape([sizes[x] for x in order])
        if self.parts > 1:
            at = next(i for i, x in enumerate(order) if x.isdigit())
            split, order = np.moveaxis(split, at, 0)[part], order[:at] + order[at + 1 :]
        return split.transpose([order.index(x) for x in letters])

    def _sizes(self, letters: str, shape: tuple[int, ...]) -> dict[str, int]:
        return dict(zip(self._letters(letters), shape, strict=True)) | {str(self.parts): self.parts}

    def _letters(self, letters: str) -> str:
        """Key-value heads count as heads in a tensor that holds both."""
        return letters if "G" in self.dims else letters.replace("G", "H")


def row(theirs: str, dims: str, *ours: str, paired: bool = False) -> Row:
    return Row(theirs, dims, ours, paired)


def linear(theirs: str, ours: str, dims: str) -> tuple[Row, Row]:
    """The weight and bias of a torch Linear: `dims` are outputs, then inputs."""
    return row(f"{theirs}.weight", dims, f"{ours}/kernel"), row(f"{theirs}.bias", dims.split()[0], f"{ours}/bias")


def norm(theirs: str, ours: str, dims: str = "D") -> tuple[Row, Row]:
    """The gain and bias of a norm."""
    return row(f"{theirs}.weight", dims, f"{ours}/gain"), row(f"{theirs}.bias", dims, f"{ours}/bias")


class Rope(NamedTuple):
    """How a family's config.json says what RoPE turns: the key of the share of a head, or of the number of dimensions."""

    fraction: str = ""  # e.g. 'partial_rotary_factor'
    size: str = ""  # e.g. 'rotary_dim'
    default: float = 1.0  # share where its key is missing
    size_default: int = 0  # dimensions where their key is missing
    theta: str = "rope_theta"  # '' where it has no key: theta is the default, and nothing is stretched
    theta_default: float = 10_000.0


class Windows(NamedTuple):
    """How a family's config.json says how far each layer sees."""

    read: Callable[[dict], list[int]]  # config.json -> the window of each layer, 0 where it sees all
    write: Callable[[list[int]], dict]  # and back


@dataclass(frozen=True)
class Family:
    name: str  # model_type in config.json
    architecture: str  # the class of `transformers` that reads it
    fixed: dict[str, object]  # our fields that all its models share
    keys: tuple[Key, ...]  # a later one stands in for an earlier one of the same field
    rows: tuple[Row, ...]
    rope: Rope | None = None
    windows: Windows | None = None
    needs: dict[str, object] = field(default_factory=dict)  # keys of config.json that may have this value only
    same: dict[str, str] = field(default_factory=dict)  # keys that may have the value of another key only
    derived: Callable[[dict], dict] = lambda config: {}  # fields of ours that more than one key decides
    ignored: tuple[str, ...] = ()  # patterns of tensors that are no parameters (tables that the library computes)
    prefix: str = ""  # of most names, which some folders leave out


def number(key: str, value) -> float:
    """The value of a key of config.json as a number; Refused where it is none."""
    if type(value) not in (int, float):
        raise Refused(f"config.json: {key}={value!r} has the wrong type: it must be a number")
    return float(value)


def count(key: str, value) -> int:
    """The value of a key of config.json that counts something; Refused where it does not."""
    if type(value) is not int or value < 0:
        raise Refused(f"config.json: {key}={value!r} is not allowed: it must be an integer of at least 0")
    return value


def _list(values) -> str:
    return ", ".join(repr(value) for value in sorted(values, key=str))
