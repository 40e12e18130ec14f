"""Another basis for the input of a layer without a skip and without a norm (Graef 2024).

    x' = x Q + b        x W + c = x' (Q^-1 W) + (c - b Q^-1 W)

The matrix that writes x is multiplied by Q: W_down of the layer before, or the tables of the embedding. The matrices that
read x are multiplied by Q^-1. With Q = W_Q and b = b_Q the query is x' itself, so the layer needs no W_Q. The same works
with W_K or W_V: `drop_query`, `drop_key` and `drop_value` each choose one. Queries, keys and values keep their values, so
RoPE, norms of queries and keys, slots and sinks stay as they are.

A layer is refused for each of these reasons:

    a skip                  x + f(x) becomes x Q + f(x): all layers would need the same Q
    a norm of x             norm(x Q) is not norm(x) Q
    sinusoidal positions    they are added to x, and no parameter holds them
    b in layer 0            the embedding has no bias, so b must be 0 there
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.connections.connection import ONE
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.linear_terms import LinearTerm
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.options.fields import with_values
from xfresearch.surgery.biases import add_bias, check_places, with_all_biases, with_biases
from xfresearch.surgery.inverse import inverse
from xfresearch.surgery.network import Network, Params, names_of
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.stream_maps import product, readers, tables, writers
from xfresearch.surgery.untie import untied

X = ""  # x among the terms of the stream
SKIPLESS = "b a(x) + c f(norm(a(x))): W_O and W_down both write the next x, and W_1 reads what W_O writes"
MIXED = "x Q for this layer alone: x is also in {}, of which later layers read mixtures, so all layers would need the same Q"
SKIP = "x Q for this layer alone: x is also added to the output (skip), so all layers would need the same Q"


class Ends(NamedTuple):
    """The names of the sublayers that read the input x of a block, and of those whose sum is the input of the next block.
    `why`: why x cannot have a basis of its own, in words; '' if it can."""

    reads: list[str]
    writes: list[str]
    why: str


def ends(block: BlockConfig) -> Ends:
    """The sublayers that read the input x of a block and write its output."""
    reads, inner, mixed, mixes = [], set(), False, ""
    parts = source = {X}  # the terms of the stream, and of what the last sublayer read
    for branch in LAYOUTS[block.layout].branches:
        connection = branch.connection
        source = {"stream": parts, "block": {X}, "before": source}[connection.reads]
        reads += [branch.name] if X in source else []
        inner |= source - {X}  # a sublayer of the same block reads them
        mixed |= {X} < source
        kept = {"stream": parts, "mixture": parts, "block": {X}, "nothing": set()}[connection.adds_to]
        parts = kept | {branch.name}
        mixes = connection.mixes or mixes
    writes = [branch.name for branch in LAYOUTS[block.layout].branches if branch.name in parts]
    if mixes:
        return Ends(reads, writes, MIXED.format(mixes))
    return Ends(reads, writes, SKIP if X in parts or mixed else SKIPLESS if parts & inner else "")


def drop(network: Network, layers, name: str, broken: bool) -> Network:
    """The network without the matrix Q called `name` of attention in `layers`. The input x of these layers becomes x Q +
    b."""
    for number in layers:
        _check_reads(network, number, name)
        _check_writes(network, number)
    shifts = {number: _shift(network, number, name) for number in layers}
    shifted = any(shift.any() for shift in shifts.values())
    if shifted:
        _check_shift(network, layers, name)
    blocks = [at.block for at in network.layers]
    reads = {number: readers(network, number, *ends(blocks[number]).reads) for number in layers}
    writes = {number - 1: writers(network, number - 1, *ends(blocks[number - 1]).writes) for number in layers if number}
    read = network.without_dropout(writes, embedding=0 in layers).change(
        layers,
        lambda block: _without(block, name, shifted),
        lambda number, block, params: _read(network, number, params, reads[number], name, shifted, broken),
    )
    written = read.change(
        writes,
        lambda block: _with_down_bias(block) if shifted else block,
        lambda number, block, params: _write(network, number, params, writes[number], name, shifted),
    )
    return _embed(written, matrix(network, 0, name)) if 0 in layers else written


def matrix(network: Network, number: int, name: str) -> np.ndarray:
    """Q: a matrix of a layer's attention, with all heads in one dimension."""
    kernel = network.inside(network.only("mixer", number))[f"{name}/kernel"]
    return kernel.reshape(len(kernel), -1)


def _shift(network: Network, number: int, name: str) -> np.ndarray:
    """b: the bias of that matrix, or zero."""
    return network.inside(network.only("mixer", number)).get(f"{name}/bias", np.zeros(1)).reshape(-1)


def _symbol(name: str) -> str:
    return f"W_{name[0].upper()}"


def _check_reads(network: Network, number: int, name: str) -> None:
    block, where = network.layers[number].block, f"layer {number}"
    at_ends = ends(block)
    refuse_unless(not at_ends.why, f"{where}, layout={block.layout!r}: {at_ends.why}")
    for branch in LAYOUTS[block.layout].branches:
        site = f"{branch.name}_in"
        norm = block.norm_at(site).kind if "in" in branch.norms and branch.name in at_ends.reads else "none"
        refuse_unless(norm == "none", f"{where}: norm(x Q) is not norm(x) Q, and norms.{site} is {norm!r}")
    a = network.only("mixer", number).options
    refuse_unless(
        isinstance(a, SoftmaxConfig), f"{where}: a mixer of kind {a.kind!r} cannot do without {_symbol(name)}"
    )
    given = getattr(a, name)
    refuse_unless(given == "learned", f"{where}: {name}={given!r} is no matrix {_symbol(name)}")
    for other, kind in a.identities.items():
        refuse_unless(other == "output", f"{where}: {other}={kind!r} reads x itself and has no matrix for Q^-1")
    rows, columns = matrix(network, number, name).shape
    more = " (expand_groups first)" if name != "query" and a.kv_heads < a.heads else ""
    refuse_unless(rows == columns, f"{where}: {_symbol(name)} is {rows} x {columns}, not square: it has no inverse{more}")


def _check_writes(network: Network, number: int) -> None:
    """Raises Refused if a matrix or table that writes the input of a layer cannot be multiplied by Q."""
    model = network.model
    if number == 0:
        kind = model.embedding_norm
        refuse_unless(kind == "none", f"layer 0: norm(x) Q is not a norm of x Q, and embedding_norm is {kind!r}")
        refuse_unless(
            model.position != "sinusoidal",
            "layer 0: x is E + sinusoids, and there is no table of the sinusoids that Q could multiply",
        )
        return
    block, where = network.layers[number - 1].block, f"layer {number - 1}"
    at_ends = ends(block)
    refuse_unless(not at_ends.why, f"{where}, layout={block.layout!r}, writes x of layer {number}: {at_ends.why}")
    for branch in LAYOUTS[block.layout].branches:
        for at in {"out", "post"} & {*branch.norms} if branch.name in at_ends.writes else ():
            site = f"{branch.name}_{at}"
            kind = block.norm_at(site).kind
            refuse_unless(kind == "none", f"{where}: norm(x) Q is not a norm of x Q, and norms.{site} is {kind!r}")
    for each in {*at_ends.writes} & {*names_of(block, "mixer")}:
        has = f"{each}/output/kernel" in network.params(number - 1)
        refuse_unless(has, f"{where}: the heads write x of layer {number} without a matrix W_O that Q could multiply")


def _check_shift(network: Network, layers, name: str) -> None:
    """Raises Refused if a sublayer that reads or writes x has no place for the bias."""
    for number in layers:
        block = network.layers[number].block
        for sublayer in ends(block).reads:
            parts = {term.part for term in readers(network, number, sublayer)} - {name}
            check_places(getattr(block, sublayer), parts, f"layer {number}: the bias of the {name}")
        if number:
            before = network.layers[number - 1].block
            where = f"layer {number - 1}: the bias of the {name} of layer {number}"
            last = LAYOUTS[before.layout].branches[-1]
            alone = ends(before).writes == [last.name] and last.connection.gain == ONE
            refuse_unless(alone, f"{where} has no place behind the gains of {before.layout!r}")
            check_places(getattr(before, last.name), {"down"}, where)
    refuse_unless(
        0 not in layers or not _shift(network, 0, name).any(),
        f"layer 0: x Q + b shifts the embedding by the bias of the {name}, so that its gradient is no longer that of x "
        "(give --layers without 0)",
    )


def _dense(block: BlockConfig) -> list[str]:
    return [name for name, options in block.sublayers.items() if "down" in options.bias_places]


def _with_down_bias(block: BlockConfig) -> BlockConfig:
    last = LAYOUTS[block.layout].branches[-1].name
    return with_values(block, {last: with_biases(getattr(block, last), {"down"})})


def _without(block: BlockConfig, name: str, shifted: bool) -> BlockConfig:
    """The block without the matrix, and with biases on the other maps of x if they are needed."""
    mixer = names_of(block, "mixer")[0]
    a = getattr(block, mixer)
    a = replace(a, **{name: "identity"}, bias=tuple(each for each in a.bias if each != name))
    if not shifted:
        return with_values(block, {mixer: a})
    maps = {each for each in ("query", "key", "value") if getattr(a, each) in ("learned", "merged")}
    # in every layer, also where nothing needs it: the layers keep one block
    dense = {each: with_biases(getattr(block, each), {"up", "down"}) for each in _dense(block)}
    return with_values(block, {mixer: with_biases(a, maps), **dense})


def _read(
    network: Network, number: int, params: Params, terms: list[LinearTerm], name: str, shifted: bool, broken: bool
) -> Params:
    """The parameters with Q^-1 W for every W that reads x."""
    basis_DD = matrix(network, number, name)
    inverse_DD = inverse(basis_DD, network.figures, f"layer {number}, {_symbol(name)}")
    inverse_DD = basis_DD.T if broken else inverse_DD
    dropped = f"{network.only('mixer', number).name}/{name}/"
    new = {path: value for path, value in params.items() if not path.startswith(dropped)}
    for term in terms:
        if term.kernel in new:
            (at,) = term.reads
            new[term.kernel] = product(inverse_DD, params[term.kernel], at)
            if shifted:
                shift_D = np.broadcast_to(_shift(network, number, name), len(basis_DD))
                add_bias(new, term.bias, -np.tensordot(shift_D, new[term.kernel], (0, at)))
    return with_all_biases(new, network.terms(number, *_dense(network.layers[number].block))) if shifted else new


def _write(network: Network, number: int, params: Params, terms: list[LinearTerm], name: str, shifted: bool) -> Params:
    """The parameters with W Q for every W that writes x of the next layer."""
    basis_DD, shift = matrix(network, number + 1, name), _shift(network, number + 1, name)
    new = dict(params)
    for path in [path for term in terms for path in (term.kernel, term.bias) if path in params]:
        new[path] = params[path] @ basis_DD
    if shifted:
        last = LAYOUTS[network.layers[number].block.layout].branches[-1].name
        new = with_all_biases(new, network.terms(number, last))
        new[f"{last}/down/bias"] = new[f"{last}/down/bias"] + shift
    return new


def _embed(network: Network, basis_DD: np.ndarray) -> Network:
    """The network with the embedding and its positions in the basis of layer 0."""
    network = untied(network)
    return network.with_outside({path: network.outside[path] @ basis_DD for path in tables(network)})
