"""The named layouts: the sublayers of a block, where its norms are, and how its sublayers are connected.

A sublayer is a function with norms, and a connection to what came before (models/connections/):

    y = skip * x + gain * out_norm(fn(in_norm(x)))      then      y = post_norm(y)

`Branch` lists the norms that exist. A missing norm is the identity.
"""

from dataclasses import dataclass, field, replace
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
    """Layouts with the same sublayers are equal, whatever their words."""

    branches: tuple[Branch, ...]
    formula: str = field(compare=False)
    paper: str = field(default="", compare=False)

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

# In formulas f is each sublayer in turn: attention, then attention to the source in `cross_` layouts, then the feed-forward.
LAYOUTS = {
    "pre_norm": Layout(_both("in"), "x + f(norm(x))", "Radford et al. 2019"),
    "post_norm": Layout(_both("post"), "norm(x + f(x))", "Vaswani et al. 2017"),
    "peri_norm": Layout(_both("in", "out"), "x + norm(f(norm(x)))", "Kim et al. 2025, who also norm the embedding"),
    "sandwich_norm": Layout(_both("in", "out"), "x + norm(f(norm(x))): peri_norm in CogView", "Ding et al. 2021"),
    "output_norm": Layout(_both("out"), "x + norm(f(x))", "OLMo 2, OLMo et al. 2024"),
    "parallel": Layout(
        (_attention("in"), _feed_forward(connection=SharedInput())),
        "x + attention(n) + feed_forward(n), n = norm(x): one norm for both",
        "GPT-J, PaLM",
    ),
    "parallel_two_norms": Layout(
        (_attention("in"), _feed_forward("in", connection=BlockInput())),
        "x + attention(norm(x)) + feed_forward(norm'(x))",
        "GPT-NeoX",
    ),
    "no_norm_between": Layout((_attention("in"), _feed_forward()), "x + attention(norm(x)), then x + feed_forward(x)"),
    "fused_output": Layout(
        (replace(_UNSKIPPED, bare=True), _feed_forward(connection=OntoBlock())),
        "x + feed_forward(heads(norm(x))): W_1 reads the heads; no W_O, skip or norm between",
    ),
    "no_residual_between": Layout(
        (_UNSKIPPED, _feed_forward(connection=OntoBlock())),
        "x + feed_forward(attention(norm(x))): the control of fused_output, which keeps W_O",
    ),
    # Without norms, too, this is the block from which matrices can be removed.
    "no_skip": Layout(_both("in", connection=Unskipped()), "f(norm(x)): no skip at all", "Graef 2024"),
    "attention_only": Layout((_attention("in"),), "x + attention(norm(x)), no feed-forward layer"),
    # The next two are SAS and SAS-P with shaped attention and W_V = W_O = I.
    "skipless": Layout(
        (_UNSKIPPED_TRAINED, _feed_forward("in", connection=Residual(TRAINED_SMALL, TRAINED))),
        "y = a attention(norm(x)), then b y + c feed_forward(norm(y)); a, b, c trained, c small at first",
        "He & Hofmann 2023",
    ),
    "skipless_parallel": Layout(
        (_UNSKIPPED_TRAINED, _feed_forward(connection=SharedInput(TRAINED_SMALL))),
        "a attention(n) + c feed_forward(n), n = norm(x); a, c trained, c small at first",
        "He & Hofmann 2023",
    ),
    "all_attention": Layout(
        (_attention("post"),), "norm(x + attention(x)), memory slots and no feed-forward layer", "Sukhbaatar et al. 2019"
    ),
    "deep_norm": Layout(
        _both("post", connection=DeepNorm()),
        "norm((2 depth)^(1/4) x + f(x)); initial values, W_O and feed-forward kernels are scaled by (8 depth)^(-1/4)",
        "Wang et al. 2022",
    ),
    "macaron": Layout(
        (
            Branch("feed_forward_1", "feed_forward", ("in",), Residual(gain=HALF)),
            _attention("in"),
            Branch("feed_forward_2", "feed_forward", ("in", "post"), Residual(gain=HALF)),
        ),
        "x + g(norm(x)) / 2, then x + attention(norm(x)), then norm(x + h(norm(x)) / 2), g and h feed-forward layers",
        "Gulati et al. 2020, eq. 1, without convolution",
    ),
    "resi_dual": Layout(
        _both("post", connection=Dual()),
        "norm(x + f(x)), and a second stream that sums all f(x); the head reads x + final_norm(sum)",
        "Xie et al. 2023",
    ),
    "hyper_connections": Layout(
        _both("in", connection=Hyper()),
        "two residual streams, which each sublayer mixes, reads and writes with trained weights; the head reads their sum",
        "Zhu et al. 2024",
    ),
    "attention_residuals": Layout(
        _both("in", connection=AttentionResiduals()),
        "f(norm(h)), h = sum of softmax(q . RMSNorm(v_j)) v_j over the embedding and all outputs v_j before; q is trained",
        "Kimi Team 2026",
    ),
    "attention_residuals_blocks": Layout(
        _both("in", connection=AttentionResiduals(per_source=3)),
        "attention_residuals, where v_j are the embedding and sums of three outputs each",
        "Kimi Team 2026",
    ),
    "cross_post_norm": Layout(_with_cross("post"), "norm(x + f(x))", "Vaswani et al. 2017, the decoder"),
    "cross_pre_norm": Layout(_with_cross("in"), "x + f(norm(x))", "Raffel et al. 2020, the decoder"),
    "cross_all_attention": Layout(_with_cross("post")[:2], "norm(x + f(x)), memory slots and no feed-forward layer"),
}


def output_scale(layout: Layout, depth: int, branch: Branch) -> float:
    """Scale of the initial last kernel of a sublayer: 1/sqrt(number of writes to the residual stream), so that the
    variance of the stream does not grow with depth (GPT-2, sec. 2.3). It is the connection's `kernel_scale` if every write
    has a norm or a trained factor, and for a sublayer without a skip, which does not write to the stream."""
    writes = [each for each in layout.branches if each.connection.adds_to != "nothing"]
    bounded = all({"out", "post"} & set(each.norms) or each.connection.gain.trained for each in writes)
    if bounded or branch.connection.adds_to == "nothing":
        return branch.connection.kernel_scale(depth)
    return (depth * len(writes)) ** -0.5
