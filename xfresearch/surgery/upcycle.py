"""upcycle: a feed-forward layer becomes a mixture of equal experts (Komatsuzaki et al. 2022).

    sum_{e chosen} g_e f(x) = f(x)        if sum_{e chosen} g_e = 1

Every expert is a copy of the layer. Gates that are divided by their sum over the chosen experts sum to 1 for any router,
so the router is drawn at random. Gates multiply biases, too. A capacity would drop choices, and the other gates do not
change then: there is none.

Equal experts get gradients that differ by the choice of tokens only. With noise above 0 each kernel of each expert has
noise of this standard deviation, relative to that of the kernel. The result is an approximation then.
"""


import numpy as np

from xfresearch.kernels.blocked_rows import BIAS
from xfresearch.models.feed_forwards.activations import ACTIVATIONS
from xfresearch.models.feed_forwards.dense import DenseConfig
from xfresearch.models.feed_forwards.moe import MoeConfig, MoeFeedForwardConfig
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.surgery.network import Network, Params, Target
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion

KERNELS = ("up", "gate", "down")


@conversion(
    "a feed-forward layer becomes a mixture of equal experts",
    conditions="the layer has no norm (SoLU); with noise it is an approximation",
    broken="with a copy in the first expert only",
    roles=("feed_forward",),
    approximate=lambda noise, **options: noise > 0,
    options={
        "experts": "number of experts",
        "top_k": "number of experts of a token",
        "noise": "standard deviation of the noise in the experts, relative to that of each kernel",
        "seed": "seed of the router and of the noise",
    },
)
def upcycle(network: Network, targets: list[Target], broken: bool = False, experts=8, top_k=2, noise=0.0, seed=0) -> Network:
    refuse_unless(1 < top_k <= experts, f"top_k={top_k} is not 2 to experts={experts}: with top_k=1 no router is trained")
    refuse_unless(noise >= 0, f"noise={noise} is below 0")
    refuse_unless(seed >= 0, f"seed={seed} is below 0")
    for each in targets:
        _check(each.options, each.where)
    return network.change_each(
        targets,
        lambda each: _with_experts(each.options, experts, top_k),
        lambda each, old: _mixture(old, experts, noise, broken, each.random(seed)),
    )


def _check(options: SublayerConfig, where: str) -> None:
    refuse_unless(isinstance(options, DenseConfig), f"{where}: the feed-forward layer is a mixture of experts already")
    kind = options.kind
    refuse_unless(not ACTIVATIONS[kind].norm, f"{where}: {kind!r} has a norm before W_down, and experts have none")


def _with_experts(old: DenseConfig, experts: int, top_k: int) -> MoeFeedForwardConfig:
    bias = ("experts",) if old.bias else ()
    moe = MoeConfig(experts=experts, top_k=top_k, expert=old.kind, renormalise=True, bias=bias)
    return MoeFeedForwardConfig(hidden=old.hidden, moe=moe)


def _mixture(params: Params, experts: int, noise: float, broken: bool, random: np.random.Generator) -> Params:
    """The parameters of `experts` copies of a feed-forward layer, and of a router."""
    new = {}
    width = len(params["up/kernel"])
    new["router/kernel"] = random.normal(size=(width, experts)) / np.sqrt(width)
    for name in KERNELS:
        kernel = params.get(f"{name}/kernel")
        if kernel is not None:
            copies = np.repeat(kernel[None], experts, 0)
            if noise:
                copies += noise * kernel.std() * random.normal(size=copies.shape)
            if broken:
                copies[1:] = 0
            new[f"experts/{name}"] = copies
        bias = params.get(f"{name}/bias")
        if bias is not None:
            new[f"experts/{name}{BIAS}"] = np.repeat(bias[None], experts, 0)
    return new
