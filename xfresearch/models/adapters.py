"""Adapters: products of low rank that are trained beside frozen matrices (LoRA, Hu et al. 2021).

    y = x (W + s A B)        s = alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023)

A (inputs x r) is drawn from U(-1/sqrt(inputs), 1/sqrt(inputs)) as in PEFT, and B (r x outputs) is 0 at first. A matrix for
each expert or for each head has an A and a B for each. The parameters are beside the matrix and named after it:
query/kernel has query/kernel_adapter/a and query/kernel_adapter/b. Linear computes (x A) B, so that W needs no gradient.
Other modules read W + s A B.

Parameters: r (inputs + outputs) of each matrix. FLOPs per token: 2 r (inputs + outputs), and 2 r inputs outputs per pass for
a matrix that is added up.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.models.costs import Costs, shared_by, weights
from xfresearch.models.linear import Linear
from xfresearch.models.parameters import parameter
from xfresearch.options.fields import option
from xfresearch.sharding.letters import Axes

ENDING = "_adapter"  # of the name of a matrix: its adapter is the attribute of this name
TRAINED = f"*{ENDING}/*"  # the pattern of the paths of the parameters of adapters


@dataclass(frozen=True)
class NoAdapter:
    kind: str = option("none", "adapters beside the matrices of the blocks (docs/finetune.md)")


@dataclass(frozen=True)
class Lora:
    kind: str = option("lora", "adapters")
    rank: int = option(8, "rank r of each adapter", low=1)
    alpha: float = option(16.0, "the scale of the adapters is alpha / r, or with rslora alpha / sqrt(r)", above=0.0)
    scaling: Literal["lora", "rslora"] = option("lora", "how the scale falls with the rank")
    targets: tuple[str, ...] = option(
        ("*",), "patterns of the paths of the matrices that get an adapter, such as ('*/query/*','*/value/*')"
    )

    @property
    def scale(self) -> float:
        """s, the factor of A B."""
        return self.alpha / (self.rank if self.scaling == "lora" else math.sqrt(self.rank))


ADAPTERS = {each().kind: each for each in (NoAdapter, Lora)}


class Dimensions(NamedTuple):
    """The dimensions of a matrix, as indices: of each of several matrices, of its input and of its output."""

    each: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def equation(self) -> str:
        """The product A B for np.einsum or jnp.einsum."""
        name = "abcdefgh".__getitem__
        each, inputs, outputs = ("".join(map(name, indices)) for indices in self)
        return f"{each}{inputs}z,{each}z{outputs}->{''.join(map(name, sorted(sum(self, ()))))}"


def dimensions(axes: Axes) -> Dimensions:
    """The dimensions of the matrix with these letters. The one that compares two tokens has a letter twice: its input's is
    the first."""
    inputs = tuple(axes.letters.index(letter) for letter in axes.inputs)
    outputs = tuple(axes.letters.rindex(letter) for letter in axes.outputs)
    each = tuple(i for i in range(len(axes.letters)) if i not in inputs + outputs)
    return Dimensions(each, inputs, outputs)


class Adapter(nnx.Module):
    """s A B beside a matrix."""

    def __init__(self, options: Lora, matrix: nnx.Param, key):
        axes, shape, dtype = matrix.axes, matrix.shape, matrix.dtype
        at = dimensions(axes)
        self.scale, self.equation = options.scale, at.equation
        each, inputs, outputs = (tuple(shape[i] for i in indices) for indices in at)
        letters = "".join(axes.letters[i] for i in at.each)
        bound = math.prod(inputs) ** -0.5
        a = jax.random.uniform(key, (*each, *inputs, options.rank), dtype, -bound, bound)
        self.a = parameter(a, f"{letters}{axes.inputs}Z", axes.inputs, "Z")
        b = jnp.zeros((*each, options.rank, *outputs), dtype)
        self.b = parameter(b, f"{letters}Z{axes.outputs}", "Z", axes.outputs)

    def __call__(self, x_TI):
        """s (x A) B [..., O] of one matrix, for rows of inputs [..., I]."""
        rank = self.a.shape[-1]
        a_IZ, b_ZO = self.a[...].reshape(-1, rank), self.b[...].reshape(rank, -1)
        return jnp.asarray(self.scale, x_TI.dtype) * ((x_TI @ a_IZ.astype(x_TI.dtype)) @ b_ZO.astype(x_TI.dtype))

    def product(self):
        """s A B, of the shape of the matrix."""
        return self.scale * jnp.einsum(self.equation, self.a[...], self.b[...])


class Beside(NamedTuple):
    """An adapter and the module that has it."""

    owner: Any
    name: str  # of the matrix in the owner
    adapter: Adapter


def matrices(block: nnx.Module) -> Iterator[tuple[str, nnx.Module, str]]:
    """(path, module that has it, name in the module) of each matrix of a block, but for those of its adapters."""
    for path, module in nnx.iter_modules(block):
        if isinstance(module, Adapter):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param) and value.axes.matrix:
                yield "/".join([*map(str, path), name]), module, name


def attach(block: nnx.Module, options: Any, prefix: str, key) -> None:
    """Gives an adapter to each matrix of a new block whose path, after `prefix`, is one of the targets."""
    if options.kind == "none":
        return
    for path, module, name in list(matrices(block)):
        if is_target(options, prefix + path):
            drawn = jax.random.fold_in(key, zlib.crc32(path.encode()))
            setattr(module, name + ENDING, nnx.data(Adapter(options, getattr(module, name), drawn)))


def is_target(options: Lora, path: str) -> bool:
    """Whether the matrix with this path gets an adapter."""
    return any(fnmatchcase(path, pattern) for pattern in options.targets)


def beside(block: nnx.Module) -> list[Beside]:
    """The adapters of a block."""
    return [
        Beside(module, name, adapter)
        for _, module, name in matrices(block)
        if (adapter := getattr(module, name + ENDING, None)) is not None
    ]


def in_place(each: Beside) -> bool:
    """Whether the module of a matrix adds the adapter's product to its own."""
    return isinstance(each.owner, Linear)


def merged(block: Any, chosen: Callable[[Beside], bool] = lambda each: True) -> Any:
    """The block with W + s A B in the place of each matrix whose adapter is `chosen`, and without these adapters."""
    if not any(map(chosen, beside(block))):
        return block
    block = jax.tree.map(lambda leaf: leaf, block)  # a copy
    for each in filter(chosen, beside(block)):
        matrix = getattr(each.owner, each.name)
        setattr(each.owner, each.name, matrix.replace(matrix[...] + each.adapter.product()))
        setattr(each.owner, each.name + ENDING, None)
    return block


def added_up(block: Any) -> Any:
    """The block as its modules read it: with W + s A B for the matrices whose modules know no adapters."""
    return merged(block, lambda each: not in_place(each))


def costs(block: nnx.Module, length: int) -> Costs:
    """Costs of the adapters of a block, which may be abstract, per token in sequences of `length`."""
    total = Costs()
    for each in beside(block):
        size = each.adapter.a.size + each.adapter.b.size
        product = each.adapter.a.shape[-1] * getattr(each.owner, each.name).size
        flops = 2 * size if in_place(each) else shared_by(2 * product, max(length, 1))
        total += weights(size) + Costs(flops_per_token=flops)
    return total
