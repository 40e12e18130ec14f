"""The interface of a connection: how a sublayer reads from what came before, and how its output joins it.

    y = skip * x + gain * f(x)

A connection is a frozen dataclass in the table of layouts (models/layouts.py). It has no state: the block holds its
parameters, as `<sublayer>_<parameter>`, and passes them to its methods, with the place of the sublayer (`At`). A new
connection is a file here that derives from `Connection`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.models.costs import Costs, weights
from xfresearch.models.parameters import times
from xfresearch.models.stream import Carried, Stream


@dataclass(frozen=True)
class Factor:
    """A factor of a vector: a constant, or one trained number.

    value: of the constant, or the initial one; or a function of the model's depth. The block's option `branch_gain`
    replaces the initial value if the factor is `optional`.
    """

    value: float | Callable[[int], float] = 1.0
    trained: bool = False
    optional: bool = False

    def at(self, depth: int, branch_gain: float = 0.0) -> float:
        """The constant, or the initial value, in a model of this depth."""
        if self.optional and branch_gain:
            return branch_gain
        return self.value(depth) if callable(self.value) else self.value


ONE = Factor()


class At(NamedTuple):
    """Where a connection stands in its stack of layers.

    number: how many sublayers of the stack have written to the stream; traced in scanned layers. of_layer: the number of
    sublayers of the layer.
    """

    width: int
    depth: int
    number: int | jax.Array
    of_layer: int

    @property
    def sublayers(self) -> int:
        """The number of sublayers of the stack, all of whose layers have `of_layer`."""
        return self.depth * self.of_layer

    @property
    def after(self) -> "At":
        """The place after the sublayer has written."""
        return self._replace(number=self.number + 1)


class Initial(NamedTuple):
    """The initial value of a parameter, and the letters of its dimensions; of a matrix also those that it reads and
    writes."""

    value: jax.Array
    letters: str
    inputs: str = ""
    outputs: str = ""


@dataclass(frozen=True)
class Connection:
    """x + f(x), and the base of all connections.

    gain: factor of the sublayer's output. skip: factor of what the output is added to.
    reads: the input of the sublayer's first norm (of the sublayer, without one): the stream, the input of the block, or the
    input that the previous sublayer read, after its norm.
    adds_to: the term that the output is added to: the stream, the input of the block, nothing, or values that travel with
    the stream, of which later sublayers read mixtures.
    mixes: these values in a few words; '' without. reads_mean: what reads the mean of the stream beside norms and
    sublayers, in words; '' if nothing does.
    ends_with: names of the carried values that `end` reads. end_formula: what the head reads, where norm is the final norm.
    end_names: the names of `end_parameters`. ends_in_norm: whether the head reads the output of the final norm alone.
    """

    gain: Factor = ONE
    skip: Factor = ONE
    reads: ClassVar[Literal["stream", "block", "before"]] = "stream"
    adds_to: ClassVar[Literal["stream", "block", "nothing", "mixture"]] = "stream"
    mixes: ClassVar[str] = ""
    reads_mean: ClassVar[str] = ""
    ends_with: ClassVar[tuple[str, ...]] = ()
    end_formula: ClassVar[str] = "norm(x)"
    end_names: ClassVar[tuple[str, ...]] = ()
    ends_in_norm: ClassVar[bool] = True

    def carried(self, at: At) -> dict[str, Carried]:
        """The values that travel with the residual stream. Their form is the same at all sublayers."""
        return {}

    def kernel_scale(self, depth: int) -> float:
        """Scale of the initial kernels of values and of feed-forward layers."""
        return 1.0

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of `parameters`."""
        return (*(["gain"] if self.gain.trained else []), *(["skip_gain"] if self.skip.trained else []))

    def parameters(self, at: At, branch_gain: float, dtype: str) -> dict[str, Initial]:
        """The parameters by name."""
        factors = {"gain": self.gain, "skip_gain": self.skip}
        first = {name: factors[name].at(at.depth, branch_gain) for name in self.parameter_names}
        return {name: Initial(jnp.full((), value, dtype), "") for name, value in first.items()}

    def costs(self, at: At) -> Costs:
        return weights(len(self.parameter_names))

    def read(self, at: At, parameters: Mapping, stream: Stream):
        """The input [B, L, D] of a sublayer that reads the stream."""
        return stream.x_BLD

    def scaled(self, at: At, parameters: Mapping, y_BLD):
        """The output of the sublayer times its factor."""
        return _times(self.gain, parameters.get("gain"), at.depth, y_BLD)

    def skipped(self, at: At, parameters: Mapping, x_BLD):
        """The term that the output is added to, times its factor."""
        return _times(self.skip, parameters.get("skip_gain"), at.depth, x_BLD)

    def write(self, at: At, parameters: Mapping, stream: Stream, block_BLD, y_BLD) -> Stream:
        """The stream after the sublayer's scaled output y. `block_BLD` is the input of the block."""
        if self.adds_to == "nothing":
            return stream._replace(x_BLD=y_BLD)
        x_BLD = {"stream": stream.x_BLD, "block": block_BLD}[self.adds_to]
        return stream._replace(x_BLD=self.skipped(at, parameters, x_BLD) + y_BLD)

    def carry(self, at: At, stream: Stream, values: Mapping) -> Stream:
        """The stream after `write`, with these values of `carried`, which taps may have changed."""
        return stream._replace(values={**stream.values, **values})

    def put(self, at: At, stream: Stream, x_BLD) -> Stream:
        """The stream with another x, from a patch or a norm."""
        return stream._replace(x_BLD=x_BLD)

    def end_parameters(self, at: At, dtype: str) -> dict[str, Initial]:
        """The parameters of `end` by name, which the model holds as `end_<parameter>`."""
        return {}

    def end_costs(self, at: At) -> Costs:
        return Costs()

    def end(self, at: At, parameters: Mapping, final_norm: Callable, stream: Stream):
        """The input of the output head, after the last sublayer."""
        return final_norm(stream.x_BLD)


def _times(factor: Factor, trained, depth: int, x_BLD):
    if factor.trained:
        return times(x_BLD, trained)
    constant = factor.at(depth)
    return x_BLD if constant == 1.0 else constant * x_BLD
