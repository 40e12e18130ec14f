"""fuse_output: W_O moves into the first matrix of the feed-forward layer, W_1.

    (o W_O + b_O) W_1 + b_1 = o (W_O W_1) + (b_O W_1 + b_1)        o: the heads

This is exact if W_1 reads o W_O and nothing else does: the layout 'no_residual_between', which becomes 'fused_output'. W_1
is every matrix that reads the input of the feed-forward layer: W_up, and W_gate or a router where there is one. Experts
have no bias, so there b_O must be 0.

In every other layout another term stands between the two matrices, and W_O is not redundant:

    pre-norm            W_1 reads norm(x + o W_O)       x is added after W_O; the length that the norm divides by has W_O
    no norm between     (x + o W_O) W_1                 x is added after W_O: x W_1 has no W_O
    no skip, a norm     W_1 reads norm(o W_O)           the length that the norm divides by has W_O
    parallel            W_1 reads norm(x)               it does not read o W_O

Without a skip and without a norm the product exists too, and `drop_output` makes it.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.connections.connection import ONE
from xfresearch.models.layouts import LAYOUTS, Branch
from xfresearch.models.mixers.memory import wide_slots
from xfresearch.surgery.biases import add_bias, check_places, with_all_biases, with_biases
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.network import Network, Params, in_layout
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.stream import first_maps

DIVIDES = "the norm divides by a length that depends on W_O"
NORM_TERMS = {"layer": DIVIDES, "rms": DIVIDES, "scale": DIVIDES}
NORM_TERMS |= {"dyt": "tanh is not linear in W_O", "derf": "erf is not linear in W_O"}


def convert(network: Network, layers, broken: bool = False) -> Network:
    for number in layers:
        block = network.layers[number].block
        where = f"layer {number}"
        refuse_unless(not (term := between(block)), f"{where}: {term}")
        check_output(block, network.params(number), where)
        refuse_unless(
            block.layout == "no_residual_between",
            f"{where}: nothing stands between W_O and W_1, but layout={block.layout!r} keeps a place for W_O: "
            "drop_output makes W_O W_1 if o has the width of the model",
        )
    biased = {network.layers[n].block for n in layers if output_bias(network.params(n)).any()}
    readers = {number: first_maps(network.axes(number), "feed_forward") for number in layers}
    return network.change(
        layers,
        lambda block: in_layout(block, "fused_output", **without_output(block, block in biased)),
        lambda number, block, params: into_first(params, readers[number], block in biased, broken),
    )


def between(block: BlockConfig) -> str:
    """The term between W_O and W_1, in words; '' if W_1 reads o W_O itself."""
    first, *rest = LAYOUTS[block.layout].branches
    if not rest:
        return f"layout={block.layout!r}: there is no W_1, W_O writes to the residual stream"
    second = rest[0]
    if second.connection.reads != "stream":
        return f"W_1 reads {_normed('x', block, first if second.connection.reads == 'before' else second, 'in')}, not o W_O"
    term, norms = _read_by_second(block, first, second)
    added = "x is added after W_O" if first.connection.adds_to != "nothing" else ""
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
    """What W_1 reads, as a formula, and the kinds of the norms in it."""
    term = _normed("o W_O", block, first, "out")
    term = f"a {term}" if first.connection.branch != ONE else term
    if first.connection.adds_to != "nothing":
        term = f"{'x' if first.connection.skip == ONE else 'alpha x'} + {term}"
    term = _normed(_normed(term, block, first, "post"), block, second, "in")
    sites = [(first, "out"), (first, "post"), (second, "in")]
    kinds = [block.norm_at(f"{each.name}_{at}").kind for each, at in sites if at in each.norms]
    return term, [kind for kind in kinds if kind != "none"]


def _normed(term: str, block: BlockConfig, branch: Branch, at: str) -> str:
    exists = at in branch.norms and block.norm_at(f"{branch.name}_{at}").kind != "none"
    return f"norm({term})" if exists else term


def check_output(block: BlockConfig, params: Params, where: str) -> None:
    """Raises Refused if there is no W_O, if W_1 reads more than o W_O, or if b_O W_1 has no place."""
    a = block.attention
    refuse_unless(
        "attention/output/kernel" in params, f"{where}: there is no W_O: a mixer of kind {a.kind!r} without it"
    )
    wide = getattr(a, "memory_slots", 0) and wide_slots(a)
    refuse_unless(not wide, f"{where}: W_1 reads o W_O + f(x k^T + b) v: the slots are added after W_O")
    if output_bias(params).any():
        check_places(block.feed_forward, {"up"}, f"{where}: b_O W_1")


def output_bias(params: Params) -> np.ndarray:
    """b_O, or zero."""
    return params.get("attention/output/bias", np.zeros(1))


def without_output(block: BlockConfig, biased: bool) -> dict:
    """The options of the two sublayers with W_O W_1, and with a place for b_O W_1 if there is one."""
    a = block.attention
    if hasattr(a, "output"):
        a = replace(a, output="identity", bias=tuple(name for name in a.bias if name != "output"))
    feed_forward = with_biases(block.feed_forward, {"up"}) if biased else block.feed_forward
    return {"attention": a, "feed_forward": feed_forward}


def into_first(params: Params, readers: dict[str, int], biased: bool, broken: bool) -> Params:
    """The parameters with W_O W_1, where W_O has one row for each number of the heads."""
    kernel = params["attention/output/kernel"]
    output_OD = kernel.reshape(-1, kernel.shape[-1])
    gone = {"attention/output/kernel", "attention/output/bias"}
    new = {path: value for path, value in params.items() if path not in gone}
    for path, at in readers.items():
        first = params[path]
        product = np.tensordot(output_OD[::-1] if broken else output_OD, first, (1, at))
        new[path] = np.moveaxis(product, 0, at)
        if biased:
            image = np.broadcast_to(output_bias(params), output_OD.shape[1]) @ first
            add_bias(new, path.removesuffix("/kernel"), image)
    return with_all_biases(new, "feed_forward") if biased else new


FUSE_OUTPUT = Conversion(
    name="fuse_output",
    about="W_O W_1 as one matrix, where W_1 reads o W_O and nothing else",
    conditions="layout 'no_residual_between' with a matrix W_O, without slots of the model's width; no bias of the output "
    "before experts",
    broken="with the rows of W_O in reverse order",
    convert=convert,
)
