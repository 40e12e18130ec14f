"""The feed-forward sublayer: two linear maps around an activation, plain or gated.

    plain:  y = f(x W_up + b) W_down + c                                 (Vaswani et al. 2017, eq. 2)
    gated:  y = (f(x W_gate + b) * m(x W_up + b')) W_down + c            (Shazeer 2020, eq. 6)

As a memory (Geva et al. 2021): the columns of W_up are the keys, the rows of W_down are the values, and the hidden
units are the coefficients. In gated kinds the columns of W_gate are the keys, and those of W_up are the multipliers. m is
the identity, except in clamped SwiGLU (gpt-oss), which limits both products and adds 1 to the second.
`softmax` makes the layer cross-attention to a trained sequence of F keys and values.

SoLU (Elhage et al. 2022): f(x) = x * softmax(x), and a LayerNorm before W_down, with a gain and a bias. The norm reads
x exp(x - max x) instead. This differs by a factor for each token, which the norm removes. The reason is epsilon: the
variance of x softmax(x) is so small (1.3e-6 at F = 3072) that the norm's epsilon would dominate it.

Parameters: 2 D F, or 3 D F if gated, and biases F + D (2 F + D if gated); 2 F for SoLU's norm. D is the width of the
input: heads * their size in a layout whose feed-forward layer reads the heads.
FLOPs per token: 2 per weight of a matrix.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import jax
import jax.numpy as jnp

from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.linear import Linear, Shape
from xfresearch.models.norms import HIDDEN, Norm, NormSpec
from xfresearch.models.parameters import kernel_std
from xfresearch.models.place import Place
from xfresearch.models.sublayer import Memory, MemoryPart, SublayerConfig, SublayerModule, reads
from xfresearch.options.fields import option
from xfresearch.runtime.errors import require


@dataclass(frozen=True)
class HiddenOptions(SublayerConfig):
    """Kind and hidden size of a feed-forward layer."""

    kind: str = option("gelu", "activation of a feed-forward layer, or 'moe' for sparse experts")
    hidden: int = option(0, "hidden size F (of each expert); 0 for hidden_factor * width", low=0)
    hidden_factor: float = option(4.0, "hidden size over width, if hidden is 0", low=0.0)

    @property
    def activation(self) -> str:
        return self.kind

    @property
    def memory_parts(self) -> dict[str, MemoryPart]:
        return {"": MemoryPart("down/kernel")}

    def resolved(self, place: Place, key: str) -> Self:
        hidden = max(self._hidden(place.width), 1)
        if not self.hidden:
            return replace(self, hidden=hidden)
        if self.hidden != hidden:  # in a resolved config they agree, even if hidden_factor is not its default
            for name in {"hidden_factor", "gated_hidden"} & self.__dataclass_fields__.keys():
                value = getattr(self, name)
                default = self.__dataclass_fields__[name].default
                allowed = f"{default!r}, its default, with hidden={self.hidden}"
                require(value == default, f"{key}.{name}", value, allowed)
        return self

    def _hidden(self, width: int) -> int:
        """The default hidden size."""
        hidden = int(self.hidden_factor * width + 1e-6)
        if ACTIVATIONS[self.activation].gated and getattr(self, "gated_hidden", "same") == "matched":
            return 8 * max(round(hidden * 2 / 3 / 8), 1)
        return hidden


@dataclass(frozen=True)
class GatedHidden:
    gated_hidden: Literal["same", "matched"] = option(
        "same",
        "hidden size of gated kinds if hidden is 0; matched: 2/3 of it (to the nearest 8), for equal parameters",
    )


@dataclass(frozen=True)
class DenseConfig(HiddenOptions):
    bias: bool = option(False, "biases on the projections")

    @property
    def words(self) -> str:
        biases = ["biases"] if self.bias else []
        return ", ".join([f"{ACTIVATIONS[self.kind].title} {self.hidden}", *biases])

    @property
    def norm_kinds(self) -> tuple[str, ...]:
        return (HIDDEN,) if ACTIVATIONS[self.kind].norm else ()

    @property
    def bias_places(self) -> tuple[str, ...]:
        return ("up", "gate", "down") if ACTIVATIONS[self.kind].gated else ("up", "down")

    def with_biases(self, parts: set[str]) -> "DenseConfig":
        return replace(self, bias=True)


@dataclass(frozen=True)
class GatedConfig(GatedHidden, DenseConfig):
    """The options of a gated feed-forward layer."""


HIDDEN_NORM = NormSpec(bias=True)  # SoLU's LayerNorm has a gain and a bias, whether or not the block's norms have


def hidden_norm(norm: NormSpec) -> NormSpec:
    """SoLU's LayerNorm in a block whose norms are `norm`."""
    return replace(HIDDEN_NORM, epsilon=norm.epsilon, cast=norm.cast)


def softmax_total(x_BLF):
    """sum exp(x - max x) [B, L, 1]: the denominator of SoLU's softmax over exp(max x)."""
    return jnp.exp(jax.nn.logsumexp(x_BLF, -1, keepdims=True) - x_BLF.max(-1, keepdims=True))


def value_std(place: Place, activation: str, hidden: int) -> float:
    """Standard deviation of the initial W_down. With softmax its rows are drawn from N(0, 1), like the values of slots:
    a mean of F values with weights near 1/F is then sqrt(e / F), and would be 1/F otherwise."""
    std = kernel_std(place, hidden)
    return std * hidden**0.5 if activation == "softmax" else std


class FeedForward(SublayerModule):
    def __init__(self, place: Place, rngs):
        f = place.options
        activation = ACTIVATIONS[f.kind]
        D, F = place.input_width, f.hidden
        into = Shape("D->F", D, F)
        self.activation = activation
        self.up = Linear(place, into, rngs, bias=f.bias, scale=place.inner_scale)
        self.gate = Linear(place, into, rngs, bias=f.bias, scale=place.inner_scale) if activation.gated else None
        norm = hidden_norm(place.norm)
        self.hidden_norm = Norm(norm, "F", (F,), place.param_dtype) if activation.norm else None
        scale = place.output_scale * value_std(place, f.kind, F) / kernel_std(place, F)
        self.down = Linear(place, Shape("F->D", F, place.width), rngs, bias=f.bias, scale=scale)

    @reads(HiddenOptions, GatedHidden, DenseConfig)
    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the unchanged cache, and no losses."""
        up_BLF = ctx.shard(self.up(x_BLD, ctx), "BLF")
        pre_BLF = ctx.tap("pre_activation", up_BLF if self.gate is None else self.gate(x_BLD, ctx))
        h_BLF = self.activation.recomputed(pre_BLF, None if self.gate is None else ctx.tap("multiplier", up_BLF))
        h_BLF = ctx.tap("hidden", h_BLF)
        h_BLF = h_BLF if self.hidden_norm is None else self.hidden_norm(softmax_total(pre_BLF) * h_BLF)
        return self.down(ctx.tap("coefficients", h_BLF), ctx), cache, Aux()

    def memories(self, dtype) -> dict[str, Memory]:
        linears = {"up": self.up, "gate": self.gate, "down": self.down}
        linears = {name: linear for name, linear in linears.items() if linear is not None}
        kernels, biases = ({name: getattr(each, part) for name, each in linears.items()} for part in ("kernel", "bias"))
        return {"": memory_of(kernels, biases, dtype)}

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        f = place.options
        D = place.input_width
        activation = ACTIVATIONS[f.kind]
        total = Shape("D->F", D, f.hidden).costs(f.bias) * (2 if activation.gated else 1)
        total += hidden_norm(place.norm).costs(f.hidden) if activation.norm else Costs()
        return total + Shape("F->D", f.hidden, place.width).costs(f.bias)


def memory_of(kernels: dict, biases: dict, dtype) -> Memory:
    """The memory whose kernels are up [..., D, F], down [..., F, D] and, in gated kinds, gate [..., D, F]. `biases` have the
    same names; a missing one is None."""
    kernels, biases = (
        {name: each[...].astype(dtype) for name, each in arrays.items() if each is not None} for arrays in (kernels, biases)
    )
    into = {name: kernels[name].swapaxes(-1, -2) for name in ("gate", "up") if name in kernels}
    first, other = ("gate", "up") if "gate" in into else ("up", "")
    values = kernels["down"]
    bias = {"biases": biases.get(first), "multiplier_biases": biases.get(other), "bias": biases.get("down")}
    return Memory(into[first], values, values, into.get(other), **bias)
