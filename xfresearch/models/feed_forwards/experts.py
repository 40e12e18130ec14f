"""The experts of a mixture: E feed-forward networks in one module.

Parameters: E n D F, n = 3 for gated experts and 2 for plain ones. FLOPs per row: 2 n D F.
"""

import math
from dataclasses import replace

from flax import nnx

from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.feed_forwards.dense import DenseConfig, value_std
from xfresearch.models.parameters import draw, kernel_std, parameter
from xfresearch.models.place import Place
from xfresearch.sharding.letters import Axes

INTO = Axes("EDF", "D", "F")
OUT = Axes("EFD", "F", "D")
AXES = {"up": INTO, "gate": INTO, "down": OUT}


def slots(moe, length: int) -> int:
    """The capacity C of an expert: the most tokens that it takes of a sequence of `length` tokens."""
    return min(math.ceil(moe.capacity * moe.top_k * length / moe.experts), length)


def shared_place(place: Place) -> Place:
    """The place of the shared experts. Together they are one feed-forward layer with the sum of their hidden sizes."""
    moe = place.options.moe
    return replace(place, options=DenseConfig(kind=moe.expert, hidden=moe.shared * place.options.hidden))


class Experts(nnx.Module):
    """E feed-forward networks with stacked kernels."""

    def __init__(self, place: Place, rngs):
        moe = place.options.moe
        D, F = place.input_width, place.options.hidden
        activation = ACTIVATIONS[moe.expert]
        self.kind = moe.expert
        self.activation = activation.function
        std = place.inner_scale * kernel_std(place, D)
        self.up = self._draw(rngs, (moe.experts, D, F), std, place, INTO)
        self.gate = self._draw(rngs, (moe.experts, D, F), std, place, INTO) if activation.gated else None
        std = place.output_scale * value_std(place, moe.expert, F)
        self.down = self._draw(rngs, (moe.experts, F, place.width), std, place, OUT)

    @staticmethod
    def _draw(rngs, shape: tuple, std: float, place: Place, axes: Axes):
        return parameter(draw(rngs.params(), shape, std, place.param_dtype), axes.letters, axes.inputs, axes.outputs)

    @property
    def count(self) -> int:
        return self.up.shape[0]

    def kernels(self, dtype) -> dict:
        """The kernels by name, in the dtype of the computation."""
        kernels = {"up": self.up, "gate": self.gate, "down": self.down}
        return {name: kernel[...].astype(dtype) for name, kernel in kernels.items() if kernel is not None}

    def __call__(self, x, product, tap, gates=None):
        """y: the output of each row's expert, times the row's gate [..., 1] if there are gates.

        product(x, name) multiplies each row with the kernel `name` of its expert. tap(name, value) sees the hidden units,
        before and after the activation. Gates multiply the hidden units: their gradient then needs no output."""
        pre = tap("pre_activation", product(x, "up" if self.gate is None else "gate"))
        h = self.activation(pre)
        h = h if self.gate is None else h * tap("multiplier", product(x, "up"))
        h = tap("coefficients", tap("hidden", h))
        return product(h if gates is None else h * gates, "down")


TAPS = ("pre_activation", "multiplier", "hidden", "coefficients")  # of Experts
