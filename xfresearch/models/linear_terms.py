"""The linear maps between a sublayer's inner values and the residual stream, as its parameters declare them.

    q = x W_Q + b_Q        h = x W_up + b        y = h W_down + c        f(x k^T + b) v

A matrix that reads the letter D reads the sublayer's input, one that reads W reads a source, the output of another stack,
and one that writes D writes a term of the output (sharding/letters.py). A kind declares these letters where it makes its
parameters, so that conversions, analyses and edits need no names of parameters. Inner values that have no matrix are in
`identities` of the options.
"""

from collections.abc import Mapping
from typing import NamedTuple

from xfresearch.models.linear import identity_plus
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.sharding.letters import Axes


class LinearTerm(NamedTuple):
    """A linear map that reads or writes the stream. Paths are those of the sublayer's parameters."""

    part: str  # of the sublayer: 'query', 'up', 'experts', 'memory'
    kernel: str  # path of the matrix: 'query/kernel', 'experts/up', 'memory/key'
    bias: str  # path of its bias, which need not exist; '' if the matrix has no place for one
    axes: Axes  # the letters of the matrix
    reads: tuple[int, ...]  # the dimensions of the matrix that meet the input; two of W_h, which compares two tokens
    writes: bool  # whether its last dimension is that of the output
    of_source: tuple[int, ...] = ()  # the dimensions that meet the source

    def inside(self, sublayer: str) -> "LinearTerm":
        """The same term with the paths of the layer's parameters."""
        return self._replace(kernel=f"{sublayer}/{self.kernel}", bias=self.bias and f"{sublayer}/{self.bias}")

    def matrix(self, params: Mapping):
        """The matrix that multiplies the stream, from the parameters {path: array} of a sublayer."""
        return matrix_of(self.kernel, params)


def matrix_of(path: str, params: Mapping):
    """The matrix of a linear map whose kernel has this path, of the parameters of a sublayer, {path: array}."""
    kernel, of = params[path], path.rpartition("/")[0]
    if f"{of}/identity_gain" not in params:
        return kernel
    return identity_plus(kernel, params[f"{of}/identity_gain"], params[f"{of}/weight_gain"])


def linear_terms(options: SublayerConfig, axes: Mapping[str, Axes]) -> list[LinearTerm]:
    """The linear terms of a sublayer whose parameters have these {path: axes}."""
    terms = []
    for path, each in axes.items():
        part, folder = path.partition("/")[0], path.rpartition("/")[0]
        reads, of_source = (_meets(each, letter) for letter in "DW")
        if reads and part in options.both_sides:
            other = (len(each.letters) - 1,)
            reads, of_source = (reads, other) if options.of_source else (reads + other, ())
        if reads or of_source or each.outputs == "D":
            bias = each.bias and f"{folder}/{each.bias}"
            terms.append(LinearTerm(part, path, bias, each, reads, each.outputs == "D", of_source))
    return terms


def _meets(axes: Axes, letter: str) -> tuple[int, ...]:
    """The dimension of a matrix that meets its input, if that has this letter."""
    return (axes.letters.index(letter),) if axes.inputs == letter else ()


def output_biases(axes: Mapping[str, Axes]) -> list[str]:
    """Paths of the parameters that a sublayer adds to its output."""
    return [path for path, each in axes.items() if each.letters in ("D", "ED") and path.endswith("bias")]
