"""The experts of a mixture: E feed-forward networks in one module.

Parameters: E n D F, n = 3 for gated experts and 2 for plain ones; with biases E ((n - 1) F + D) more. FLOPs per row:
2 n D F.
"""

import math
from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp
from flax import nnx

from xfresearch.kernels.blocked_rows import BIAS
from xfresearch.models.costs import Costs, weights
from xfresearch.models.feed_forwards.activations import ACTIVATIONS, times
from xfresearch.models.feed_forwards.dense import DenseConfig, memory_of, value_std
from xfresearch.models.parameters import draw, kernel_std, parameter
from xfresearch.models.place import Place
from xfresearch.models.sublayer import Memory
from xfresearch.sharding.letters import Axes

LETTERS = {"up": ("EDF", "D", "F"), "gate": ("EDF", "D", "F"), "down": ("EFD", "F", "D")}  # all, inputs, outputs
AXES = {name: Axes(*letters, bias=name + BIAS) for name, letters in LETTERS.items()}
AXES |= {each.bias: Axes(f"E{each.outputs}") for each in AXES.values()}


def slots(moe, length: int) -> int:
    """The capacity C of an expert: the most tokens that it takes of a sequence of `length` tokens."""
    return min(math.ceil(moe.capacity * moe.top_k * length / moe.experts), length)


def shared_place(place: Place) -> Place:
    """The place of the shared experts. Together they are one feed-forward layer with the sum of their hidden sizes."""
    moe = place.options.moe
    hidden = moe.shared * place.options.hidden
    return replace(place, options=DenseConfig(kind=moe.expert, hidden=hidden, bias="experts" in moe.bias))


class Experts(nnx.Module):
    """E feed-forward networks with stacked kernels and biases."""

    def __init__(self, place: Place, rngs):
        moe = place.options.moe
        D, F = place.input_width, place.options.hidden
        activation = ACTIVATIONS[moe.expert]
        self.kind = moe.expert
        self.activation = activation
        std = place.inner_scale * kernel_std(place, D)
        self.up = self._draw("up", rngs, (moe.experts, D, F), std, place)
        self.gate = self._draw("gate", rngs, (moe.experts, D, F), std, place) if activation.gated else None
        std = place.output_scale * value_std(place, moe.expert, F)
        self.down = self._draw("down", rngs, (moe.experts, F, place.width), std, place)
        biased = "experts" in moe.bias
        self.up_bias = self._zeros("up", F, place) if biased else None
        self.gate_bias = self._zeros("gate", F, place) if biased and activation.gated else None
        self.down_bias = self._zeros("down", place.width, place) if biased else None

    @staticmethod
    def _draw(name: str, rngs, shape: tuple, std: float, place: Place):
        return nnx.Param(draw(rngs.params(), shape, std, place.param_dtype), axes=AXES[name])

    @staticmethod
    def _zeros(name: str, size: int, place: Place):
        """The bias of the kernel `name`."""
        zeros = jnp.zeros((place.options.moe.experts, size), place.param_dtype)
        return parameter(zeros, AXES[name + BIAS].letters)

    @property
    def count(self) -> int:
        return self.up.shape[0]

    def weights(self, dtype) -> dict:
        """The kernels by name, in the dtype of the computation, and the biases, in their own."""
        arrays = {name: getattr(self, name) for name in AXES}
        arrays = {name: each[...] for name, each in arrays.items() if each is not None}
        return {name: each if name.endswith(BIAS) else each.astype(dtype) for name, each in arrays.items()}

    def memory(self, dtype) -> Memory:
        """The memory of all experts."""
        kernels, biases = ({name: getattr(self, name + end) for name in ("up", "gate", "down")} for end in ("", BIAS))
        return memory_of(kernels, biases, dtype)

    @property
    def into(self) -> tuple[str, ...]:
        """The names of the kernels that read the rows."""
        return ("up",) if self.gate is None else ("gate", "up")

    def __call__(self, x, products, tap=None, gates=None):
        """y: the output of each row's expert, times the row's gate [..., 1] if there are gates.

        products(x, names, gates) returns for each name the product of each row with this kernel of its expert, with its bias
        times the gates if they are given. tap(name, value), if given, sees the hidden units before and after the activation.
        Gates multiply the hidden units and the last bias: their gradient then needs no output."""
        into = products(x, self.into)
        if tap is None:
            h = self.activation.recomputed(*into, gates=gates)
        else:
            h = tap("hidden", self.activation(*map(tap, TAPS, into)))
            h = times(tap("coefficients", h), gates)
        return products(h, ("down",), gates)[0]

    @staticmethod
    def costs(place: Place, used: Fraction) -> Costs:
        """used: the number of experts of an average token."""
        moe, D, F = place.options.moe, place.input_width, place.options.hidden
        into = 2 if ACTIVATIONS[moe.expert].gated else 1
        kernels = into * D * F + F * place.width
        biases = into * F + place.width if "experts" in moe.bias else 0
        total = weights(moe.experts * (kernels + biases), math.ceil(used * (kernels + biases)))
        return total + Costs(flops_per_token=2 * math.ceil(used * kernels))


TAPS = ("pre_activation", "multiplier", "hidden", "coefficients")  # of Experts
