"""The named layouts: where a block's norms and skips stand. Data only; `block.py` holds the formula that reads it.

A sublayer is a function with norms and a skip around it:

    y = skip * x + gain * out_norm(fn(in_norm(x)))      then      y = post_norm(y)

`Sublayer` says which norms exist at each place; an absent norm is the identity, an absent gain 1. `skip` is 1, 0, a number
that is fixed (DeepNorm's) or a trained one.
"""

from dataclasses import dataclass, replace
from typing import Literal

from xfresearch.errors import UserError, require


@dataclass(frozen=True)
class Sublayer:
    name: str  # 'attention' or 'feed_forward'
    norms: tuple[str, ...] = ()  # a subset of ('in', 'out', 'post')
    reads: Literal["stream", "block", "before"] = "stream"  # x so far; the block's input; what the sublayer before read
    skip: Literal["stream", "block", "none"] = "stream"  # what its output is added to
    gain: Literal["", "one", "small"] = ""  # its output has a trained factor, at first 1 or `branch_gain`
    skip_gain: bool = False  # what its output is added to has a trained factor, at first 1


@dataclass(frozen=True)
class Layout:
    sublayers: tuple[Sublayer, ...]
    fused: bool = False  # attention has no W_O: its heads are what the feed-forward's first matrix reads
    deep_norm: bool = False  # the skip is scaled up and the first kernels down, with depth
    dual: bool = False  # a second stream sums all outputs, and is added, normed, to the last x


def _both(*norms: str, **more) -> tuple[Sublayer, ...]:
    return Sublayer("attention", norms, **more), Sublayer("feed_forward", norms, **more)


_ATTENTION = Sublayer("attention", ("in",))
_SKIPLESS = Sublayer("attention", ("in",), skip="none")
_SKIPLESS_GAIN = replace(_SKIPLESS, gain="one")

LAYOUTS = {
    # x + f(norm(x)); Radford et al. 2019
    "pre_norm": Layout(_both("in")),
    # norm(x + f(x)); Vaswani et al. 2017
    "post_norm": Layout(_both("post")),
    # x + norm(f(norm(x))); Kim et al. 2025, who also norm the embedding and the last x (embedding_norm, final_norm)
    "peri_norm": Layout(_both("in", "out")),
    # x + norm(f(x)); OLMo et al. 2024 (OLMo 2)
    "output_norm": Layout(_both("out")),
    # x + a(n) + f(n), n = norm(x); GPT-J, PaLM
    "parallel": Layout((_ATTENTION, Sublayer("feed_forward", reads="before"))),
    # x + a(norm(x)) + f(norm'(x)), a norm each; GPT-NeoX
    "parallel_two_norms": Layout((_ATTENTION, Sublayer("feed_forward", ("in",), reads="block"))),
    # x + a(norm(x)), then x + f(x)
    "no_norm_between": Layout((_ATTENTION, Sublayer("feed_forward"))),
    # x + f(heads(norm(x))): no W_O, residual or norm between heads and W_1
    "fused_output": Layout((_SKIPLESS, Sublayer("feed_forward", skip="block")), fused=True),
    # x + f(a(norm(x))): W_O, and no residual or norm between it and W_1; the control of fused_output
    "no_residual_between": Layout((_SKIPLESS, Sublayer("feed_forward", skip="block"))),
    # f(norm(a(norm(x)))): no skip at all; Graef 2024 removes matrices where there is no norm either
    "no_skip": Layout(_both("in", skip="none")),
    # x + a(norm(x)), no feed-forward
    "attention_only": Layout((_ATTENTION,)),
    # x = a attention(norm(x)), then b x + c f(norm(x)), a, b, c trained; He & Hofmann 2023, with shaping and identities SAS
    "skipless": Layout((_SKIPLESS_GAIN, Sublayer("feed_forward", ("in",), gain="small", skip_gain=True))),
    # a attention(n) + c f(n), n = norm(x), a, c trained; He & Hofmann 2023, with shaping and identities SAS-P
    "skipless_parallel": Layout((_SKIPLESS_GAIN, Sublayer("feed_forward", reads="before", gain="small"))),
    # norm(x + a(x)), no feed-forward; Sukhbaatar et al. 2019
    "all_attention": Layout((Sublayer("attention", ("post",)),)),
    # norm(alpha x + f(x)), alpha = (2 depth)^(1/4); Wang et al. 2022
    "deep_norm": Layout(_both("post"), deep_norm=True),
    # norm(x + f(x)) and, beside it, the sum of all f; Xie et al. 2023
    "resi_dual": Layout(_both("post"), dual=True),
}
# CogView's name for the same sublayers, with the embedding left as it is; Ding et al. 2021
LAYOUTS["sandwich_norm"] = LAYOUTS["peri_norm"]


def norm_kind(block, sublayer: str, place: str) -> str:
    """The norm at a site of a block: `norms.<sublayer>_<place>` where it is set, otherwise `norm`."""
    return getattr(block.norms, f"{sublayer}_{place}") or block.norm


def site_block(block, sublayer: str, place: str):
    """The block as the norm at one site has it: without gain and bias where `norm_bare` names the site, and with the first
    alpha of DyT that attention's sites have (Zhu et al. 2025: another one from width 2048 on)."""
    bare = f"{sublayer}_{place}" in block.norm_bare
    if sublayer == "attention" and block.norm_alpha_attention:
        block = replace(block, norm_alpha=block.norm_alpha_attention)
    return replace(block, norm_gain=False, norm_bias=False) if bare else block


def check_sites(block, key: str) -> None:
    """UserError where `norms` sets a site that the block's layout does not have."""
    sites = {f"{s.name}_{place}" for s in LAYOUTS[block.layout].sublayers for place in s.norms}
    for site, kind in vars(block.norms).items():
        if kind and site not in sites:
            has = f"layout={block.layout!r} has the sites {', '.join(sorted(sites))}"
            raise UserError(f"config.{key}.norms.{site}={kind!r} is not allowed: {has}")
    allowed = f"among the sites of layout={block.layout!r}: {', '.join(sorted(sites))}"
    require(set(block.norm_bare) <= sites, f"{key}.norm_bare", block.norm_bare, allowed)


def skip_scale(model, block) -> float:
    """Factor of the skip: DeepNorm's alpha = (2 depth)^(1/4) for a decoder (Wang et al. 2022, table 2), otherwise 1."""
    return (2 * model.depth) ** 0.25 if LAYOUTS[block.layout].deep_norm else 1.0


def inner_scale(model, block) -> float:
    """Scale of the first kernels of values and feed-forward: DeepNorm's beta = (8 depth)^(-1/4), otherwise 1."""
    return (8 * model.depth) ** -0.25 if LAYOUTS[block.layout].deep_norm else 1.0


def output_scale(model, block, sublayer: str) -> float:
    """Scale of the first values of a sublayer's last kernel: 1/sqrt(writes to the residual stream), so that the stream's
    variance does not grow with depth (GPT-2, sec. 2.3); where a norm or a gain follows the write, or the sublayer has no
    skip and so writes to no stream, as `inner_scale`."""
    sublayers = {s.name: s for s in LAYOUTS[block.layout].sublayers}
    writes = [s for s in sublayers.values() if s.skip != "none"]
    tamed = all({"out", "post"} & set(s.norms) or s.gain for s in writes)
    if tamed or sublayers[sublayer].skip == "none":
        return inner_scale(model, block)
    return (model.depth * len(writes)) ** -0.5


def first_gain(model, block, sublayer: Sublayer) -> float:
    """First value of a sublayer's trained gain: 1, or `branch_gain`, which is 0.1 at 18 layers and falls with 1/sqrt(depth)
    (He & Hofmann 2023; their code)."""
    return 1.0 if sublayer.gain == "one" else block.branch_gain or 0.1 * (18 / model.depth) ** 0.5
