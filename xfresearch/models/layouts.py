"""The named layouts: the sublayers of a block, where its norms are, and how its sublayers are connected.

A sublayer is a function with norms, and a connection to what came before (models/connections/):

    y = skip * x + gain * out_norm(fn(in_norm(x)))      then      y = post_norm(y)

`Branch` lists the norms that exist. A missing norm is the identity.
"""

from dataclasses import dataclass, replace
from typing import Literal

from xfresearch.models.connections.attention_residuals import AttentionResiduals
from xfresearch.models.connections.connection import At, Connection
from xfresearch.models.connections.dual import Dual
from xfresearch.models.connections.hyper import Hyper
from xfresearch.models.connections.parallel import BlockInput, OntoBlock, SharedInput
from xfresearch.models.connections.residual import HALF, TRAINED, TRAINED_SMALL, DeepNorm, Residual
from xfresearch.models.connections.unskipped import Unskipped


@dataclass(frozen=True)
class Branch:
    """A sublayer in a layout. Its name is free; its role is what it does."""

    name: str  # key of its options, parameters and taps
    role: Literal["mixer", "cross", "feed_forward"]
    norms: tuple[str, ...] = ()  # a subset of ('in', 'out', 'post')
    connection: Connection = Residual()
    bare: bool = False  # it has no output matrix: the next sublayer reads its heads

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of its norms in the block's `norms`."""
        return tuple(f"{self.name}_{place}" for place in self.norms)


@dataclass(frozen=True)
class Layout:
    branches: tuple[Branch, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of all norms of a block."""
        return tuple(site for branch in self.branches for site in branch.sites)

    def at(self, width: int, depth: int, layer=0, sublayer: int = 0) -> At:
        """The place of a sublayer of a layer, whose number may be traced."""
        return At(width, depth, layer * len(self.branches) + sublayer, len(self.branches))

    @property
    def reads_source(self) -> bool:
        """Whether a sublayer reads the encoder's output."""
        return any(branch.role == "cross" for branch in self.branches)

    @property
    def optional_gain(self) -> bool:
        """Whether the block's option `branch_gain` sets the initial factor of a sublayer."""
        return any(branch.connection.gain.optional for branch in self.branches)


_PLAIN = Residual()


def _attention(*norms: str, connection: Connection = _PLAIN) -> Branch:
    return Branch("attention", "mixer", norms, connection)


def _feed_forward(*norms: str, connection: Connection = _PLAIN) -> Branch:
    return Branch("feed_forward", "feed_forward", norms, connection)


def _both(*norms: str, connection: Connection = _PLAIN) -> tuple[Branch, ...]:
    return _attention(*norms, connection=connection), _feed_forward(*norms, connection=connection)


def _with_cross(*norms: str) -> tuple[Branch, ...]:
    attention, feed_forward = _both(*norms)
    return attention, Branch("cross_attention", "cross", norms), feed_forward


_UNSKIPPED = _attention("in", connection=Unskipped())
_UNSKIPPED_TRAINED = _attention("in", connection=Unskipped(gain=TRAINED))

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
    "parallel": Layout((_attention("in"), _feed_forward(connection=SharedInput()))),
    # x + a(norm(x)) + f(norm'(x)), two different norms; GPT-NeoX
    "parallel_two_norms": Layout((_attention("in"), _feed_forward("in", connection=BlockInput()))),
    # x + a(norm(x)), then x + f(x)
    "no_norm_between": Layout((_attention("in"), _feed_forward())),
    # x + f(heads(norm(x))): no W_O, skip or norm between the heads and W_1
    "fused_output": Layout((replace(_UNSKIPPED, bare=True), _feed_forward(connection=OntoBlock()))),
    # x + f(a(norm(x))): no skip or norm between W_O and W_1; the control of fused_output
    "no_residual_between": Layout((_UNSKIPPED, _feed_forward(connection=OntoBlock()))),
    # f(norm(a(norm(x)))): no skip; Graef 2024 removes matrices if there is no norm either
    "no_skip": Layout(_both("in", connection=Unskipped())),
    # x + a(norm(x)), no feed-forward
    "attention_only": Layout((_attention("in"),)),
    # x = a attention(norm(x)), then b x + c f(norm(x)), with trained a, b, c; He & Hofmann 2023. This is SAS with
    # shaping and identities.
    "skipless": Layout((_UNSKIPPED_TRAINED, _feed_forward("in", connection=Residual(TRAINED_SMALL, TRAINED)))),
    # a attention(n) + c f(n), n = norm(x), with trained a, c; He & Hofmann 2023. This is SAS-P with shaping and
    # identities.
    "skipless_parallel": Layout((_UNSKIPPED_TRAINED, _feed_forward(connection=SharedInput(TRAINED_SMALL)))),
    # norm(x + a(x)), no feed-forward; Sukhbaatar et al. 2019
    "all_attention": Layout((_attention("post"),)),
    # norm(alpha x + f(x)), alpha = (2 depth)^(1/4); Wang et al. 2022
    "deep_norm": Layout(_both("post", connection=DeepNorm())),
    # x + f(norm(x)) / 2, then x + a(norm(x)), then norm(x + g(norm(x)) / 2); Gulati et al. 2020, eq. 1, without convolution
    "macaron": Layout(
        (
            Branch("feed_forward_1", "feed_forward", ("in",), Residual(gain=HALF)),
            _attention("in"),
            Branch("feed_forward_2", "feed_forward", ("in", "post"), Residual(gain=HALF)),
        )
    ),
    # norm(x + f(x)), and a second stream with the sum of all f; Xie et al. 2023
    "resi_dual": Layout(_both("post", connection=Dual())),
    # two streams that each sublayer mixes, reads and writes; Zhu et al. 2024
    "hyper_connections": Layout(_both("in", connection=Hyper())),
    # f(norm(mixture of the outputs before it)); Kimi Team 2026 (arXiv 2603.15031)
    "attention_residuals": Layout(_both("in", connection=AttentionResiduals())),
    # the same of the sums of three outputs each, the block form
    "attention_residuals_blocks": Layout(_both("in", connection=AttentionResiduals(per_source=3))),
    # norm(x + a(x)), norm(x + c(x, source)), norm(x + f(x)): the decoder of Vaswani et al. 2017, sec. 3.1
    "cross_post_norm": Layout(_with_cross("post")),
    # x + a(norm(x)), x + c(norm(x), source), x + f(norm(x)): the decoder of T5, Raffel et al. 2020, sec. 2.1
    "cross_pre_norm": Layout(_with_cross("in")),
    # norm(x + a(x)), norm(x + c(x, source)), no feed-forward: the decoder of all-attention layers
    "cross_all_attention": Layout(_with_cross("post")[:2]),
}
# CogView's name for the same block, without a norm of the embedding; Ding et al. 2021
LAYOUTS["sandwich_norm"] = LAYOUTS["peri_norm"]


def output_scale(layout: Layout, depth: int, branch: Branch) -> float:
    """Scale of the initial last kernel of a sublayer: 1/sqrt(number of writes to the residual stream), so that the
    variance of the stream does not grow with depth (GPT-2, sec. 2.3). It is the connection's `kernel_scale` if every write
    has a norm or a trained factor, and for a sublayer without a skip, which does not write to the stream."""
    writes = [each for each in layout.branches if each.connection.adds_to != "nothing"]
    bounded = all({"out", "post"} & set(each.norms) or each.connection.gain.trained for each in writes)
    if bounded or branch.connection.adds_to == "nothing":
        return branch.connection.kernel_scale(depth)
    return (depth * len(writes)) ** -0.5
