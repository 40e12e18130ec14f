"""Norms, one function each, computed in float32 or wider. NORMS has their formulas and papers. The result is multiplied by a
gain (plus an offset), and a bias is added; both have D numbers, so derf has up to 2 D + 2 parameters. No matrix products.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from xfresearch.kernels.dtypes import wide_dtype
from xfresearch.models.costs import Costs, weights
from xfresearch.models.parameters import parameter, plus, rounded, times
from xfresearch.models.recompute import recomputed


def layer(x, epsilon: float, at=None):
    return scale(project(x), epsilon, None if at is None else project(at))


def project(x, epsilon: float = 0.0, at=None):
    return x - x.mean(-1, keepdims=True)


def scale(x, epsilon: float, at=None):
    at = x if at is None else at
    return x * jax.lax.rsqrt(jnp.square(at).mean(-1, keepdims=True) + epsilon)


class NormFunction(NamedTuple):
    # Of x, epsilon and `at`: x with the factor of the norm at the value `at`, or at x. If it has alpha, of alpha x + shift,
    # and `at` is not read.
    function: Callable
    formula: str
    paper: str = ""
    reads: tuple[str, ...] = ()  # which of 'epsilon', 'alpha', 'shift' it has; with alpha it acts on each number alone
    title: str = ""  # its name in text for people; '' for 'KIND norm'

    def __call__(self, x, epsilon: float, at=None):
        return self.function(x, epsilon, at)


EPSILON = ("epsilon",)
NORMS = {
    "layer": NormFunction(layer, "(x - mean(x)) / sqrt(var(x) + epsilon)", "Ba et al. 2016", EPSILON, "LayerNorm"),
    "rms": NormFunction(scale, "x / sqrt(mean(x^2) + epsilon)", "Zhang & Sennrich 2019", EPSILON, "RMSNorm"),
    # Its output has length sqrt(D), as LayerNorm's. The published code has length 1/sqrt(D), which is D times less.
    "scale": NormFunction(scale, "rms, as the second half of LayerNorm, after project", "Brody et al. 2023", EPSILON),
    "project": NormFunction(project, "x - mean(x): the first half of LayerNorm, not rescaled", "Brody et al. 2023"),
    "dyt": NormFunction(lambda x, *_: jnp.tanh(x), "tanh(alpha x), alpha trained", "Zhu et al. 2025", ("alpha",), "DyT"),
    "derf": NormFunction(
        lambda x, *_: jax.lax.erf(x),
        "erf(alpha x + shift), both trained, shift 0 at first",
        "Chen et al. 2025",
        ("alpha", "shift"),
        "Derf",
    ),
    "none": NormFunction(lambda x, *_: x, "x", title="no norm"),
}
HIDDEN = "hidden"  # the kind of a norm inside a sublayer that uses only the epsilon and the cast of the block's norm
WITH_EPSILON, WITH_ALPHA = (tuple(name for name in NORMS if part in NORMS[name].reads) for part in ("epsilon", "alpha"))
if TYPE_CHECKING:  # a checker cannot read the values of a table
    NormKind = str
    SiteKind = str
else:
    NormKind, SiteKind = Literal[*NORMS], Literal["", *NORMS]


def title(kind: str) -> str:
    """The name of a kind of norm in text for people."""
    return (kind in NORMS and NORMS[kind].title) or f"{kind} norm"


@dataclass(frozen=True)
class NormSpec:
    """The function of a norm and its parameters."""

    kind: str = "layer"
    gain: bool = True
    bias: bool = False
    epsilon: float = 1e-5
    cast: str = "after_gain"  # where float32 is converted to the dtype of the computation; or 'before_gain'
    offset: float = 0.0  # added to the gain, which starts at scale - offset
    alpha: float = 0.5  # initial value of the alpha of dyt and derf
    scale: float = 1.0  # of the initial gain

    @property
    def parts(self) -> dict[str, bool]:
        """Whether the norm has each of its parameters."""
        exists = self.kind != "none"
        own = {part: part in NORMS[self.kind].reads for part in ("alpha", "shift")}
        return {"gain": exists and self.gain, "bias": exists and self.bias, **own}

    @property
    def affine(self) -> bool:
        """Whether the norm has a gain or a bias."""
        return self.parts["gain"] or self.parts["bias"]

    def costs(self, *shape: int) -> Costs:
        """Costs of the norm over dimensions of these sizes."""
        parts = self.parts
        size = math.prod(shape)
        return weights(size * (parts["gain"] + parts["bias"]) + parts["alpha"] + parts["shift"])


class Norm(nnx.Module):
    """A norm over the last dimensions of x, whose letters and sizes are `letters` and `shape`."""

    def __init__(self, spec: NormSpec, letters: str, shape: tuple[int, ...], param_dtype: str):
        self.spec = spec
        self.axes = len(shape)  # the number of dimensions of x that it norms over
        parts = spec.parts
        gain = jnp.full(shape, spec.scale - spec.offset, param_dtype)
        self.gain = parameter(gain, letters) if parts["gain"] else None
        self.bias = parameter(jnp.zeros(shape, param_dtype), letters) if parts["bias"] else None
        self.alpha = parameter(jnp.full((), spec.alpha, param_dtype), "") if parts["alpha"] else None
        self.shift = parameter(jnp.zeros((), param_dtype), "") if parts["shift"] else None

    def __call__(self, x):
        return recomputed(self._normed, x)

    def _normed(self, x):
        wide = wide_dtype(x)
        y = x.astype(wide)
        if self.alpha is not None:
            y = y * self.alpha[...].astype(wide)
        if self.shift is not None:
            y = y + self.shift[...].astype(wide)
        y = self._function(y.reshape(*x.shape[: -self.axes], -1)).reshape(x.shape)
        if self.spec.cast == "before_gain":  # each step is rounded to x's dtype; gradients are summed in float32
            return self._affine(y.astype(x.dtype))
        return self._affine(y).astype(x.dtype)

    def frozen(self, x, at):
        """The norm as a linear map of x [..., D], with the factors that it has at the value `at` [..., D], and without its
        constant part: norm(at) = frozen(at, at) + constant(). So the terms of a sum can be followed through the norm."""
        at, x = (value.astype(wide_dtype(x)) for value in (at, x))
        return self._gained(self._function(x, at) if self.alpha is None else x * self._secant(at))

    def _function(self, x, at=None):
        return NORMS[self.spec.kind](x, self.spec.epsilon, at)

    def constant(self):
        """The term beside the linear map: the bias, and gain * f(shift) with a shift. None if there is none."""
        bias = None if self.bias is None else self.bias[...]
        if self.shift is None:
            return bias
        shift = self.shift[...]
        at_zero = self._gained(self._function(shift.astype(wide_dtype(shift))))
        return at_zero if bias is None else at_zero + bias

    def _secant(self, at):
        """The factor at the value `at` of a function f of each number: (f(alpha at + shift) - f(shift)) / at. Near 0 the
        difference has no digits left, so there it is the derivative in the middle, whose error in the norm, O(step^3), is
        below rounding."""
        assert self.alpha is not None
        alpha = self.alpha[...].astype(at.dtype)
        shift = jnp.zeros_like(alpha) if self.shift is None else self.shift[...].astype(at.dtype)
        step = alpha * at
        near = jnp.abs(step) < jnp.finfo(at.dtype).eps ** (1 / 3)
        _, derivative = jax.jvp(self._function, (shift + step / 2,), (jnp.ones_like(step),))
        quotient = (self._function(step + shift) - self._function(shift)) / jnp.where(near, 1, step)
        return alpha * jnp.where(near, derivative, quotient)

    def _gained(self, x):
        return x if self.gain is None else x * (self.spec.offset + self.gain[...])

    def _affine(self, y):
        """y times the gain, plus the bias, both rounded to y's dtype."""
        if self.gain is not None:
            y = times(y, rounded(self.spec.offset + self.gain[...], y.dtype))
        if self.bias is not None:
            y = plus(y, rounded(self.bias[...], y.dtype))
        return y
