"""A case: what the tests know of a variant, written by hand from the paper and not from our code.

A file in tests/variants/ ends with `CASES`, a list with the case of one variant or of a few that are alike. The class of a
case says in which table of `xfresearch/models/` the variant is, and what its reference, in NumPy and float64, gets and
returns. There p holds the parameters of one layer by name, and x_LD is one sequence. Every tap is compared, so the reference
calls record(name, value) (tests/reference/records.py) where the module calls `ctx.tap`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np

BOTH = ("attention", "feed_forward")  # the sublayers of most layouts


@dataclass(frozen=True)
class Parameter:
    """initial: the standard deviation of a normal distribution, or the value itself: a number, an array of one layer's
    shape, or a function of (shape in one layer, options of the model, options of the block) that returns it.
    matrix: '' for a parameter that is no matrix, so that it does not decay and Muon leaves it to Adam; otherwise the role of
    each dimension: b (one matrix for each index; the first dimension is that of stacked layers), i inputs, o outputs. One
    word for each number of dimensions.
    """

    initial: float | np.ndarray | Callable
    matrix: str = ""


NORM = Parameter(0.0)  # stands for all parameters of a norm


@dataclass(frozen=True)
class Case:
    """parameters: {path: parameter} of the variant, with paths as in the messages of the tests: 'block/attention/sink'.
    values: {option: values to try} of numbers, and of lists of which a few values are enough; the tests find kinds and short
    lists themselves. 'size' for a size; 'covered' if tests with the mark `covers` try the values.
    needs: {option: value} without which the variant does not exist.
    needs_of: {'attention.rank', or 'attention.query=merged': {option: value}}, the same for an option, or one value of it.
    writes: {beginning of a contract's case: why} if a sublayer writes 3 to 20 times as much or as little as the base's.

    Names of options are those of the block, as in 'attention.heads', or of the model.
    """

    option: ClassVar[str] = ""  # the option of the block whose value is the name
    name: str
    reference: Callable
    parameters: dict[str, Parameter] = field(default_factory=dict, kw_only=True)
    values: dict[str, list | Literal["size", "covered"]] = field(default_factory=dict, kw_only=True)
    needs: dict = field(default_factory=dict, kw_only=True)
    needs_of: dict[str, dict] = field(default_factory=dict, kw_only=True)
    writes: dict[str, str] = field(default_factory=dict, kw_only=True)


class NormCase(Case):
    """reference(p, x, epsilon): the norm of x [..., D], without the gain and the bias that every norm may have. The paths of
    `parameters` are the names of p: the norm may be in many places."""

    option = "norm"


def _same(x):
    return x


@dataclass(frozen=True)
class ActivationCase(Case):
    """reference(z): the hidden units [..., F], where z = x W_up.

    gated: the hidden units are reference(z) * multiplier(x W_up), where z = x W_gate.
    down_scale: factor of the initial W_down, given the number of hidden units.
    """

    option = "feed_forward.kind"
    gated: bool = False
    multiplier: Callable = _same
    down_scale: Callable[[int], float] = lambda hidden: 1.0


class Drawing(NamedTuple):
    """How often the drawing of a block shows what the layout's formula has."""

    norms: int
    sums: int  # of two or three terms
    skips: int  # around sublayers
    factors: int  # of outputs
    second: int = 0  # sums in a second stream


@dataclass(frozen=True)
class LayoutCase(Case):
    """reference(x, a, f, n, b, N): the stream x [L, D] after a block. a, f: its sublayers in their order
    (tests/reference/part.py): a(x, h, after) is after(output of the sublayer for h), with x in the stream; a.end(x) gets
    the stream after it, and a.carries(name, value) each other value that travels on, which b['carried'] keeps. n[site]: a
    norm of the block, b[name]: a parameter of the block, N: the depth.

    scaled: the sublayers whose last kernel starts with the factor (N * their number)^(-1/2): those that write to the stream
    (GPT-2, sec. 2.3), but none if each of them has a norm after it or a trained factor.
    kernel_scale: factor of the other initial kernels of values and of feed-forward layers, given the depth.
    end(x, b, norm): what the head reads, where norm is the final norm.
    """

    option = "layout"
    drawing: Drawing
    scaled: tuple[str, ...] = ()
    kernel_scale: Callable[[int], float] = lambda depth: 1.0
    end: Callable = lambda x, b, norm: norm(x)


class Sequence(NamedTuple):
    """What a mixer knows of its sequence besides x."""

    positions: np.ndarray  # [L]
    segments: np.ndarray  # [L], the document of each token, 0 for padding
    causal: bool
    layer: int  # from 0 on
    longest: int  # the window, or the longest sequence
    shared: dict  # parameters that layers share, and values that travel between layers


class MixerCase(Case):
    """reference(p, x_LD, block, sequence): the output [L, D], given the options of the block and a `Sequence`."""

    option = "attention.kind"


class FeedForwardCase(Case):
    """reference(p, x_LD, options, block, segments, model): the output [L, D], and {auxiliary loss: its sum over tokens},
    given the options of the sublayer, the block and the model, and the document of each token."""

    option = "feed_forward.kind"


@dataclass(frozen=True)
class ModelCase(Case):
    """The options and parameters that belong to no variant: those of the model and of every block."""

    reference: None = None
