"""The named layouts: the sublayers of a block, and where its norms and skips are.

A sublayer is a function with norms and a skip:

    y = skip * x + gain * out_norm(fn(in_norm(x)))      then      y = post_norm(y)

`Sublayer` lists the norms that exist. A missing norm is the identity, a missing gain is 1. `skip` is 1, 0, a constant
(DeepNorm) or a trained number.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Sublayer:
    name: str  # key of its options, parameters and taps
    holds: Literal["mixer", "feed_forward"]
    norms: tuple[str, ...] = ()  # a subset of ('in', 'out', 'post')
    reads: Literal["stream", "block", "before"] = "stream"  # x; input of the block; input of the sublayer before
    skip: Literal["stream", "block", "none"] = "stream"  # what its output is added to
    gain: Literal["", "one", "small"] = ""  # its output has a trained factor, initially 1 or `branch_gain`
    skip_gain: bool = False  # its skip has a trained factor, initially 1
    bare: bool = False  # it has no output matrix: the next sublayer reads its heads

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of its norms in the block's `norms`."""
        return tuple(f"{self.name}_{place}" for place in self.norms)


@dataclass(frozen=True)
class Layout:
    sublayers: tuple[Sublayer, ...]
    deep_norm: bool = False  # the skip is scaled up and initial kernels are scaled down with the depth
    dual: bool = False  # a second stream sums all outputs; its norm is added to the final x

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of all norms of a block."""
        return tuple(site for sublayer in self.sublayers for site in sublayer.sites)

    @property
    def small_gain(self) -> bool:
        """Whether the gain of a sublayer starts at `branch_gain`."""
        return any(sublayer.gain == "small" for sublayer in self.sublayers)


def _attention(*norms: str, **more) -> Sublayer:
    return Sublayer("attention", "mixer", norms, **more)


def _feed_forward(*norms: str, **more) -> Sublayer:
    return Sublayer("feed_forward", "feed_forward", norms, **more)


def _both(*norms: str, **more) -> tuple[Sublayer, ...]:
    return _attention(*norms, **more), _feed_forward(*norms, **more)


_SKIPLESS = _attention("in", skip="none")
_SKIPLESS_GAIN = replace(_SKIPLESS, gain="one")

LAYOUTS = {
    # x + f(norm(x)); Radford et al. 2019
    "pre_norm": Layout(_both("in")),
    # norm(x + f(x)); Vaswani et al. 2017
    "post_norm": Layout(_both("post")),
    # x + norm(f(norm(x))); Kim et al. 2025, who also norm the embedding and the final x (embedding_norm, final_norm)
    "peri_norm": Layout(_both("in", "out")),
    # x + norm(f(x)); OLMo et al. 2024 (OLMo 2)
    "output_norm": Layout(_both("out")),
    # x + a(n) + f(n), n = norm(x); GPT-J, PaLM
    "parallel": Layout((_attention("in"), _feed_forward(reads="before"))),
    # x + a(norm(x)) + f(norm'(x)), two different norms; GPT-NeoX
    "parallel_two_norms": Layout((_attention("in"), _feed_forward("in", reads="block"))),
    # x + a(norm(x)), then x + f(x)
    "no_norm_between": Layout((_attention("in"), _feed_forward())),
    # x + f(heads(norm(x))): no W_O, skip or norm between the heads and W_1
    "fused_output": Layout((replace(_SKIPLESS, bare=True), _feed_forward(skip="block"))),
    # x + f(a(norm(x))): no skip or norm between W_O and W_1; the control of fused_output
    "no_residual_between": Layout((_SKIPLESS, _feed_forward(skip="block"))),
    # f(norm(a(norm(x)))): no skip; Graef 2024 removes matrices if there is no norm either
    "no_skip": Layout(_both("in", skip="none")),
    # x + a(norm(x)), no feed-forward
    "attention_only": Layout((_attention("in"),)),
    # x = a attention(norm(x)), then b x + c f(norm(x)), with trained a, b, c; He & Hofmann 2023. This is SAS with
    # shaping and identities.
    "skipless": Layout((_SKIPLESS_GAIN, _feed_forward("in", gain="small", skip_gain=True))),
    # a attention(n) + c f(n), n = norm(x), with trained a, c; He & Hofmann 2023. This is SAS-P with shaping and
    # identities.
    "skipless_parallel": Layout((_SKIPLESS_GAIN, _feed_forward(reads="before", gain="small"))),
    # norm(x + a(x)), no feed-forward; Sukhbaatar et al. 2019
    "all_attention": Layout((_attention("post"),)),
    # norm(alpha x + f(x)), alpha = (2 depth)^(1/4); Wang et al. 2022
    "deep_norm": Layout(_both("post"), deep_norm=True),
    # norm(x + f(x)), and a second stream with the sum of all f; Xie et al. 2023
    "resi_dual": Layout(_both("post"), dual=True),
}
# CogView's name for the same block, without a norm of the embedding; Ding et al. 2021
LAYOUTS["sandwich_norm"] = LAYOUTS["peri_norm"]


def skip_scale(layout: Layout, depth: int) -> float:
    """Factor of the skip: DeepNorm's alpha = (2 depth)^(1/4) for a decoder (Wang et al. 2022, table 2), otherwise 1."""
    return (2 * depth) ** 0.25 if layout.deep_norm else 1.0


def inner_scale(layout: Layout, depth: int) -> float:
    """Scale of the initial kernels of values and feed-forward: DeepNorm's beta = (8 depth)^(-1/4), otherwise 1."""
    return (8 * depth) ** -0.25 if layout.deep_norm else 1.0


def output_scale(layout: Layout, depth: int, sublayer: Sublayer) -> float:
    """Scale of the initial last kernel of a sublayer: 1/sqrt(number of writes to the residual stream), so that the
    variance of the stream does not grow with depth (GPT-2, sec. 2.3). It is `inner_scale` if every write has a norm or
    a gain, and for a sublayer without a skip, which does not write to the stream."""
    writes = [s for s in layout.sublayers if s.skip != "none"]
    bounded = all({"out", "post"} & set(s.norms) or s.gain for s in writes)
    if bounded or sublayer.skip == "none":
        return inner_scale(layout, depth)
    return (depth * len(writes)) ** -0.5


def first_gain(sublayer: Sublayer, depth: int, branch_gain: float) -> float:
    """Initial value of a sublayer's trained gain: 1, or `branch_gain`, by default 0.1 at 18 layers and proportional to
    1/sqrt(depth) (He & Hofmann 2023; their code)."""
    return 1.0 if sublayer.gain == "one" else branch_gain or 0.1 * (18 / depth) ** 0.5
