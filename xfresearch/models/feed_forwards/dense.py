"""The feed-forward sublayer: two linear maps around an activation, plain or gated.

    plain:  y = f(x W_up + b) W_down + c                                 (Vaswani et al. 2017, eq. 2)
    gated:  y = (f(x W_gate + b) * (x W_up + b')) W_down + c             (Shazeer 2020, eq. 6)

Read as a memory (Geva et al. 2021): the columns of W_up are keys, the rows of W_down values, and what stands between
them are the coefficients. Gated kinds have the columns of W_gate as keys, those of W_up as multipliers. `softmax` makes
it cross-attention to a trained sequence of F keys and values.

SoLU (Elhage et al. 2022): f(x) = x * softmax(x), and a LayerNorm before W_down, with a gain and a bias. The norm reads
x exp(x - max x), the same but for a factor of each token, which a norm takes out: the variance of x softmax(x) is so small
(1.3e-6 at F = 3072) that the norm's epsilon would decide its output.

Parameters: 2 D F, or 3 D F gated, and biases F + D (2 F + D gated); 2 F for SoLU's norm. D is the width of what is read:
heads * their size in a layout whose feed-forward reads the heads.      FLOPs per token: 2 per weight of a matrix.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp

from xfresearch.config.fields import option
from xfresearch.errors import require
from xfresearch.models.context import Aux, Context
from xfresearch.models.costs import Costs
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.linear import Linear, Shape
from xfresearch.models.norms import Norm, NormSpec
from xfresearch.models.parameters import kernel_std
from xfresearch.models.place import Place
from xfresearch.models.sublayer import Memory, SublayerConfig, SublayerModule


@dataclass(frozen=True)
class HiddenOptions(SublayerConfig):
    """The hidden size of a feed-forward layer."""

    kind: str = option("gelu", "activation of a feed-forward layer, or 'moe' for sparse experts")
    hidden: int = option(0, "hidden size F (of each expert); 0 is hidden_factor * width", low=0)
    hidden_factor: float = option(4.0, "hidden size over width, where hidden is 0", low=0.0)

    @property
    def activation(self) -> str:
        return self.kind

    def resolved(self, place: Place, key: str) -> "HiddenOptions":
        hidden = max(self._hidden(place.width), 1)
        if not self.hidden:
            return replace(self, hidden=hidden)
        if self.hidden != hidden:  # a config that was resolved before gives both, in agreement
            for name in {"hidden_factor", "gated_hidden"} & self.__dataclass_fields__.keys():
                value, default = getattr(self, name), self.__dataclass_fields__[name].default
                given = f"{default!r}, its default, with hidden={self.hidden}"
                require(value == default, f"{key}.{name}", value, given)
        return self

    def _hidden(self, width: int) -> int:
        """The hidden size where none is given."""
        hidden = int(self.hidden_factor * width + 1e-6)
        if ACTIVATIONS[self.activation].gated and getattr(self, "gated_hidden", "same") == "matched":
            return 8 * max(round(hidden * 2 / 3 / 8), 1)
        return hidden


@dataclass(frozen=True)
class GatedHidden:
    gated_hidden: Literal["same", "matched"] = option(
        "same",
        "where hidden is 0, gated kinds have the same hidden size, or 2/3 of it (to the nearest 8): equal parameters",
    )


@dataclass(frozen=True)
class DenseConfig(HiddenOptions):
    bias: bool = option(False, "biases on the projections")

    @property
    def norm_kinds(self) -> tuple[str, ...]:
        return (HIDDEN,) if ACTIVATIONS[self.kind].norm else ()


@dataclass(frozen=True)
class GatedConfig(GatedHidden, DenseConfig):
    """The options of a gated feed-forward layer."""


HIDDEN = "hidden"  # SoLU's LayerNorm among the kinds of norms: it has the block's epsilon and cast, and no other option
HIDDEN_NORM = NormSpec(bias=True)  # SoLU's LayerNorm has a gain and a bias, whatever the block's norms have


def hidden_norm(norm: NormSpec) -> NormSpec:
    """SoLU's LayerNorm in a block whose norms are `norm`."""
    return replace(HIDDEN_NORM, epsilon=norm.epsilon, cast=norm.cast)


def softmax_total(x_BLF):
    """sum exp(x - max x) [B, L, 1]: what SoLU's softmax divides by, less a power of e."""
    return jnp.exp(jax.nn.logsumexp(x_BLF, -1, keepdims=True) - x_BLF.max(-1, keepdims=True))


def value_std(place: Place, activation: str, hidden: int) -> float:
    """Standard deviation of W_down, whose rows are values. Under softmax they are drawn N(0, 1) as memory slots are: a mean
    of F values with weights near 1/F would be 1/F otherwise, and is sqrt(e / F) so."""
    std = kernel_std(place, hidden)
    return std * hidden**0.5 if activation == "softmax" else std


class FeedForward(SublayerModule):
    def __init__(self, place: Place, rngs):
        f, activation, D, F = place.options, ACTIVATIONS[place.options.kind], place.input_width, place.options.hidden
        into = Shape("D->F", D, F)
        self.activation = activation.function
        self.up = Linear(place, into, rngs, bias=f.bias, scale=place.inner_scale)
        self.gate = Linear(place, into, rngs, bias=f.bias, scale=place.inner_scale) if activation.gated else None
        norm = hidden_norm(place.norm)
        self.hidden_norm = Norm(norm, "F", (F,), place.param_dtype) if activation.norm else None
        scale = place.output_scale * value_std(place, f.kind, F) / kernel_std(place, F)
        self.down = Linear(place, Shape("F->D", F, place.width), rngs, bias=f.bias, scale=scale)

    def __call__(self, x_BLD, ctx: Context, cache=None):
        """y_BLD, the cache as it was, and no losses."""
        h_BLF = ctx.shard(self.up(x_BLD, ctx), "BLF")
        scale_BL1 = None if self.hidden_norm is None else softmax_total(h_BLF)
        h_BLF = self.activation(h_BLF) if self.gate is None else self.activation(self.gate(x_BLD, ctx)) * h_BLF
        h_BLF = ctx.tap("hidden", h_BLF)
        h_BLF = h_BLF if self.hidden_norm is None else self.hidden_norm(scale_BL1 * h_BLF)
        return self.down(ctx.tap("coefficients", h_BLF), ctx), cache, Aux()

    def memories(self, dtype) -> dict[str, Memory]:
        kernels = {"up": self.up, "gate": self.gate, "down": self.down}
        return {"": memory_of({name: linear.kernel for name, linear in kernels.items() if linear is not None}, dtype)}

    @staticmethod
    def costs(place: Place, length: int) -> Costs:
        f, D, activation = place.options, place.input_width, ACTIVATIONS[place.options.kind]
        total = Shape("D->F", D, f.hidden).costs(f.bias) * (2 if activation.gated else 1)
        total += hidden_norm(place.norm).costs(f.hidden) if activation.norm else Costs()
        return total + Shape("F->D", f.hidden, place.width).costs(f.bias)


def memory_of(kernels: dict, dtype) -> Memory:
    """Kernels up [..., D, F], perhaps gate, and down [..., F, D] as a memory."""
    kernels = {name: kernel[...].astype(dtype) for name, kernel in kernels.items()}
    up, values = kernels["up"].swapaxes(-1, -2), kernels["down"]
    return Memory(kernels["gate"].swapaxes(-1, -2), values, up) if "gate" in kernels else Memory(up, values)
