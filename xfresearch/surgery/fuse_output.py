"""fuse_output: W_O moves into the first matrix of the feed-forward layer, W_1.

    (o W_O + b_O) W_1 + b_1 = o (W_O W_1) + (b_O W_1 + b_1)        o: the heads

This is exact if W_1 reads o W_O and nothing else does: the layout 'no_residual_between', which becomes 'fused_output'. W_1
is every matrix that reads the input of the feed-forward layer: W_up, and W_gate or a router where there is one, those of
each expert with its own bias.

In every other layout another term stands between the two matrices, and W_O is not redundant:

    pre-norm            W_1 reads norm(x + o W_O)       x is added after W_O; the length that the norm divides by has W_O
    no norm between     (x + o W_O) W_1                 x is added after W_O: x W_1 has no W_O
    no skip, a norm     W_1 reads norm(o W_O)           the length that the norm divides by has W_O
    parallel            W_1 reads norm(x)               it does not read o W_O

Without a skip and without a norm the product exists too, and `drop_output` makes it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.connections.connection import ONE
from xfresearch.models.layouts import LAYOUTS, Branch
from xfresearch.models.linear_terms import LinearTerm
from xfresearch.models.mixers.memory_slots import wide_slots
from xfresearch.surgery.biases import add_bias, check_places, with_all_biases, with_biases
from xfresearch.surgery.network import Network, Params, in_layout, inside, put
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion
from xfresearch.surgery.stream_maps import product, readers

DIVIDES = "the norm divides by a length that depends on W_O"
NORM_TERMS = {"layer": DIVIDES, "rms": DIVIDES, "scale": DIVIDES}
NORM_TERMS |= {"dyt": "tanh is not linear in W_O", "derf": "erf is not linear in W_O"}


@conversion(
    "W_O W_1 as one matrix, where W_1 reads o W_O and nothing else",
    conditions="layout 'no_residual_between' with a matrix W_O, without slots of the model's width",
    broken="with the rows of W_O in reverse order",
)
def fuse_output(network: Network, layers, broken: bool = False) -> Network:
    for number in layers:
        layout = network.layers[number].block.layout
        check(network, number)
        refuse_unless(
            layout == "no_residual_between",
            f"layer {number}: nothing stands between W_O and W_1, but layout={layout!r} keeps a place for W_O: "
            "drop_output makes W_O W_1 if o has the width of the model",
        )
    return fused(network, layers, broken, lambda block, **options: in_layout(block, "fused_output", **options))


def check(network: Network, number: int) -> None:
    """Raises Refused if something stands between W_O and W_1, if there is no W_O, if W_1 reads more than o W_O, or if b_O
    W_1 has no place."""
    block, where = network.layers[number].block, f"layer {number}"
    mixer = network.only("mixer", number)
    refuse_unless(not (term := between(block)), f"{where}: {term}")
    a, params = mixer.options, network.inside(mixer)
    refuse_unless("output/kernel" in params, f"{where}: there is no W_O: a mixer of kind {a.kind!r} without it")
    wide = a.slots and wide_slots(a)
    refuse_unless(not wide, f"{where}: W_1 reads o W_O + f(x k^T + b) v: the slots are added after W_O")
    if output_bias(params).any():
        reader = _pair(block)[1].name
        check_places(getattr(block, reader), _parts(readers(network, number, reader)), f"{where}: b_O W_1")


def fused(network: Network, layers, broken: bool, with_options: Callable[..., BlockConfig]) -> Network:
    """The network with W_O W_1. with_options(block, **options of the two sublayers) is the new block."""
    network = network.without_dropout(layers)  # of o W_O before, of o after
    terms = {n: network.terms(n, _pair(network.layers[n].block)[1].name) for n in layers}
    biased = [n for n in layers if output_bias(network.inside(network.only("mixer", n))).any()]
    parts = {network.layers[n].block: _parts([term for term in terms[n] if term.reads]) for n in biased}
    return network.change(
        layers,
        lambda block: with_options(block, **_without_output(block, parts.get(block, set()))),
        lambda number, block, params: _into_first(block, params, terms[number], block in parts, broken),
    )


def _parts(terms: list[LinearTerm]) -> set[str]:
    return {term.part for term in terms}


def _pair(block: BlockConfig) -> tuple[Branch, Branch]:
    """The mixer of a block, and the sublayer after it, where nothing is between them."""
    first, second = _and_next(block, "mixer")
    assert second, "`between` has told that there is one"
    return first, second


def _and_next(block: BlockConfig, role: str) -> tuple[Branch, Branch | None]:
    branches = LAYOUTS[block.layout].branches
    at = next(index for index, branch in enumerate(branches) if branch.role == role)
    return branches[at], branches[at + 1] if at + 1 < len(branches) else None


def between(block: BlockConfig, role: str = "mixer") -> str:
    """The term between W_O of the sublayer of a role and W_1, in words; '' if W_1 reads o W_O itself."""
    first, second = _and_next(block, role)
    if second is None:
        return f"layout={block.layout!r}: there is no W_1, W_O writes to the residual stream"
    if second.role != "feed_forward":
        return f"layout={block.layout!r}: {second.name} follows {first.name}, and has no W_1"
    if second.connection.reads != "stream":
        return f"W_1 reads {_normed('x', block, first if second.connection.reads == 'before' else second, 'in')}, not o W_O"
    term, norms = _read_by_second(block, first, second)
    added = "x is added after W_O" if first.connection.adds_to != "nothing" else ""
    if mixes := first.connection.mixes:
        return f"W_O writes to {mixes}, of which W_1 reads a mixture"
    if not added and not norms and second.connection.adds_to == "stream":
        return f"b o W_O + f({term} W_1): the skip of the feed-forward layer reads W_O too"
    if not added and not norms:
        return ""
    if not norms:
        return f"({term}) W_1: the residual x is added between"
    reasons = [added] if added else []
    reasons += sorted({NORM_TERMS.get(kind, f"the norm {kind!r} stands between W_O and W_1") for kind in norms})
    return f"W_1 reads {term}: {', and '.join(reasons)}"


def _read_by_second(block: BlockConfig, first: Branch, second: Branch) -> tuple[str, list[str]]:
    """The input of W_1 as a formula, and the kinds of the norms in it."""
    term = _normed("o W_O", block, first, "out")
    term = f"a {term}" if first.connection.gain != ONE else term
    if first.connection.adds_to != "nothing":
        term = f"{'x' if first.connection.skip == ONE else 'alpha x'} + {term}"
    term = _normed(_normed(term, block, first, "post"), block, second, "in")
    sites = [(first, "out"), (first, "post"), (second, "in")]
    kinds = [block.norm_at(f"{each.name}_{at}").kind for each, at in sites if at in each.norms]
    return term, [kind for kind in kinds if kind != "none"]


def _normed(term: str, block: BlockConfig, branch: Branch, at: str) -> str:
    exists = at in branch.norms and block.norm_at(f"{branch.name}_{at}").kind != "none"
    return f"norm({term})" if exists else term


def output_bias(params: Params) -> np.ndarray:
    """b_O, or zero. `params` are those of the mixer."""
    return params.get("output/bias", np.zeros(1))


def _without_output(block: BlockConfig, parts: set[str]) -> dict:
    """The options of the two sublayers with W_O W_1, and with biases on these parts of W_1, which take b_O W_1."""
    mixer, reader = (branch.name for branch in _pair(block))
    a, feed_forward = getattr(block, mixer), getattr(block, reader)
    if hasattr(a, "output"):
        a = replace(a, output="identity", bias=tuple(name for name in a.bias if name != "output"))
    return {mixer: a, reader: with_biases(feed_forward, parts) if parts else feed_forward}


def _into_first(block: BlockConfig, params: Params, terms: list[LinearTerm], biased: bool, broken: bool) -> Params:
    """The parameters with W_O W_1, where W_O has one row for each number of the heads."""
    mixer = _pair(block)[0].name
    old = inside(params, mixer)
    kernel = old["output/kernel"]
    output_OD = kernel.reshape(-1, kernel.shape[-1])
    new = put(params, mixer, {path: value for path, value in old.items() if not path.startswith("output/")})
    for term in (term for term in terms if term.reads):
        kernel = params[term.kernel]
        new[term.kernel] = product(output_OD[::-1] if broken else output_OD, kernel, term.reads[0])
        if biased:
            add_bias(new, term.bias, np.broadcast_to(output_bias(old), output_OD.shape[1]) @ kernel)
    return with_all_biases(new, terms) if biased else new
