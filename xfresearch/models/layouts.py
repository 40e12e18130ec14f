"""The named layouts: where a block's norms and skips stand. Data only; `block.py` holds the formula that reads it.

A sublayer is a function with norms and a skip around it:

    y = skip * x + out_norm(fn(in_norm(x)))      then      y = post_norm(y)

`Sublayer` says which norms exist at each place; an absent norm is the identity. Under `parallel` every sublayer reads
the block's own input, and their outputs are summed.
"""

from dataclasses import dataclass

from xfresearch.errors import UserError


@dataclass(frozen=True)
class Sublayer:
    name: str  # 'attention' or 'feed_forward'
    norms: tuple[str, ...]  # a subset of ('in', 'out', 'post')
    skip: float = 1.0


@dataclass(frozen=True)
class Layout:
    sublayers: tuple[Sublayer, ...]
    parallel: bool = False


def _both(*norms: str) -> tuple[Sublayer, ...]:
    return Sublayer("attention", norms), Sublayer("feed_forward", norms)


LAYOUTS = {
    "pre_norm": Layout(_both("in")),  # x + f(norm(x)); Radford et al. 2019
    "post_norm": Layout(_both("post")),  # norm(x + f(x)); Vaswani et al. 2017
    "peri_norm": Layout(_both("in", "out")),  # x + norm(f(norm(x))); Kim et al. 2025
    "parallel": Layout(_both("in"), parallel=True),  # x + a(norm(x)) + f(norm(x)), a norm each; GPT-NeoX
    "no_norm_between": Layout((Sublayer("attention", ("in",)), Sublayer("feed_forward", ()))),
    "all_attention": Layout((Sublayer("attention", ("post",)),)),  # norm(x + f(x)), no feed-forward; Sukhbaatar 2019
}


def norm_kind(block, sublayer: str, place: str) -> str:
    """The norm at a site of a block: `norms.<sublayer>_<place>` where it is set, otherwise `norm`."""
    return getattr(block.norms, f"{sublayer}_{place}") or block.norm


def check_sites(block, key: str) -> None:
    """UserError where `norms` sets a site that the block's layout does not have."""
    sites = {f"{s.name}_{place}" for s in LAYOUTS[block.layout].sublayers for place in s.norms}
    for site, kind in vars(block.norms).items():
        if kind and site not in sites:
            has = f"layout={block.layout!r} has the sites {', '.join(sorted(sites))}"
            raise UserError(f"config.{key}.norms.{site}={kind!r} is not allowed: {has}")


def output_scale(model, block) -> float:
    """Scale of the kernels that write to the residual stream: 1/sqrt(writes), so that its variance does not grow with
    depth (GPT-2, sec. 2.3); 1 where a norm follows the write."""
    sublayers = LAYOUTS[block.layout].sublayers
    normed = all({"out", "post"} & set(s.norms) for s in sublayers)
    return 1.0 if normed else (model.depth * len(sublayers)) ** -0.5
