"""Another basis for the input of a layer without a skip and without a norm (Graef 2024).

    x' = x Q + b        x W + c = x' (Q^-1 W) + (c - b Q^-1 W)

What writes x is multiplied by Q: W_down of the layer before, or the tables of the embedding. What reads x is multiplied
by Q^-1. With Q = W_Q and b = b_Q the query is x' itself, and W_Q disappears; the same with W_K or W_V. `drop_query`,
`drop_key` and `drop_value` each choose one of them. Only what leaves the layer is compared: queries, keys and values do
not change, so RoPE, norms of queries and keys, slots and sinks stay as they are.

This is a change of one layer's input only. With a skip, x is also a part of the output and of all later inputs:

    x + f(x)  ->  x Q + f(x)

so all layers would need the same Q. A norm between x and the matrices has another length for x Q: norm(x Q) is not
norm(x) Q. Sinusoidal positions are no table that Q could multiply. The embedding has no bias for b: as a shift of the table
it would not be a change of basis, and a factor of the embedding would act on b too. So b must be 0 in layer 0.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.feed_forwards.dense import DenseConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.surgery.biases import add_bias, check_places, with_all_biases, with_biases
from xfresearch.surgery.inverse import inverse
from xfresearch.surgery.network import Network, Params
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.stream import bias_of, first_maps, last_kernels, tables
from xfresearch.surgery.untie import untied

READ = {"no_skip": ("attention",), "skipless_parallel": ("attention", "feed_forward")}  # sublayers that read x
WRITE = {
    "no_skip": ("feed_forward",),
    "skipless_parallel": ("attention", "feed_forward"),
}  # those that write the next x
SKIPLESS = "b a(x) + c f(norm(a(x))): W_O and W_down both write the next x, and W_1 reads what W_O writes"
SKIP = "x Q for this layer alone: x is also added to the output (skip), so all layers would need the same Q"


def drop(network: Network, layers, name: str, broken: bool) -> Network:
    """The network without the matrix `name` of attention in `layers`: its output is the basis of the layer's input."""
    for number in layers:
        _check_reads(network, number, name)
        _check_writes(network, number)
    shifted = any(_shift(network.params(number), name).any() for number in layers)
    if shifted:
        _check_shift(network, layers, name)
    reads = {number: _reads(network, number) for number in layers}
    writes = {number - 1: _writes(network, number - 1) for number in layers if number}
    read = network.change(
        layers,
        lambda block: _without(block, name, shifted),
        lambda number, block, params: _read(network, number, params, reads[number], name, shifted, broken),
    )
    written = read.change(
        writes,
        lambda block: replace(block, feed_forward=with_biases(block.feed_forward, {"down"})) if shifted else block,
        lambda number, block, params: _write(params, writes[number], network.params(number + 1), name, shifted),
    )
    return _embed(written, network.params(0), name) if 0 in layers else written


def matrix(params: Params, name: str) -> np.ndarray:
    """Q: a matrix of attention, with all heads in one dimension."""
    kernel = params[f"attention/{name}/kernel"]
    return kernel.reshape(len(kernel), -1)


def _shift(params: Params, name: str) -> np.ndarray:
    """b: the bias of that matrix, or zero."""
    return params.get(f"attention/{name}/bias", np.zeros(1)).reshape(-1)


def _symbol(name: str) -> str:
    return f"W_{name[0].upper()}"


def _in_the_way(block: BlockConfig) -> str:
    """Why the input of a layer with this layout has no basis of its own."""
    return SKIPLESS if block.layout == "skipless" else SKIP


def _check_reads(network: Network, number: int, name: str) -> None:
    block, where = network.layers[number].block, f"layer {number}"
    refuse_unless(block.layout in READ, f"{where}, layout={block.layout!r}: {_in_the_way(block)}")
    norm = block.norm_at("attention_in").kind
    refuse_unless(norm == "none", f"{where}: norm(x Q) is not norm(x) Q, and norms.attention_in is {norm!r}")
    a = block.attention
    refuse_unless(
        isinstance(a, SoftmaxConfig), f"{where}: a mixer of kind {a.kind!r} cannot do without {_symbol(name)}"
    )
    given = getattr(a, name)
    refuse_unless(given == "learned", f"{where}: {name}={given!r} is no matrix {_symbol(name)}")
    for other in ("query", "key", "value"):
        bare = getattr(a, other).startswith("identity")
        refuse_unless(not bare, f"{where}: {other}={getattr(a, other)!r} reads x itself and has no matrix for Q^-1")
    rows, columns = matrix(network.params(number), name).shape
    refuse_unless(rows == columns, f"{where}: {_symbol(name)} is {rows} x {columns}, not square: it has no inverse")


def _check_writes(network: Network, number: int) -> None:
    """Raises Refused if what writes the input of a layer cannot be multiplied by Q."""
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
    refuse_unless(
        block.layout in WRITE, f"{where}, layout={block.layout!r}, writes x of layer {number}: {_in_the_way(block)}"
    )
    if "attention" in WRITE[block.layout]:
        has = "attention/output/kernel" in network.params(number - 1)
        refuse_unless(has, f"{where}: the heads write x of layer {number} without a matrix W_O that Q could multiply")


def _check_shift(network: Network, layers, name: str) -> None:
    """Raises Refused if the bias has no place where x is read or written."""
    for number in layers:
        block, axes = network.layers[number].block, _reads(network, number)
        for sublayer in READ[block.layout]:
            maps = {path.split("/")[1] for path in axes if path.startswith(f"{sublayer}/")} - {name}
            check_places(getattr(block, sublayer), maps, f"layer {number}: the bias of the {name}")
        if number:
            before = network.layers[number - 1].block
            where = f"layer {number - 1}: the bias of the {name} of layer {number}"
            refuse_unless(before.layout == "no_skip", f"{where} has no place behind the gains of {before.layout!r}")
            check_places(before.feed_forward, {"down"}, where)
    first = network.params(0) if 0 in layers else None
    refuse_unless(
        first is None or not _shift(first, name).any(),
        f"layer 0: x Q + b shifts the embedding by the bias of the {name}, so that its gradient is no longer that of x",
    )


def _reads(network: Network, number: int) -> dict[str, int]:
    return first_maps(network.axes(number), *READ[network.layers[number].block.layout])


def _writes(network: Network, number: int) -> list[str]:
    return last_kernels(network.axes(number), *WRITE[network.layers[number].block.layout])


def _without(block: BlockConfig, name: str, shifted: bool) -> BlockConfig:
    """The block without the matrix, and with biases on the other maps of x if they are needed."""
    a = block.attention
    a = replace(a, **{name: "identity"}, bias=tuple(each for each in a.bias if each != name))
    if not shifted:
        return replace(block, attention=a)
    maps = {each for each in ("query", "key", "value") if getattr(a, each) in ("learned", "merged")}
    f = block.feed_forward
    # in every layer, also where nothing needs it: the layers keep one block
    f = with_biases(f, {"up", "down"}) if isinstance(f, DenseConfig) else f
    return replace(block, attention=with_biases(a, maps), feed_forward=f)


def _read(
    network: Network, number: int, params: Params, paths: dict[str, int], name: str, shifted: bool, broken: bool
) -> Params:
    """The parameters with Q^-1 W for every W that reads x."""
    basis_DD = matrix(params, name)
    inverse_DD = inverse(basis_DD, network.figures, f"layer {number}, {_symbol(name)}")
    inverse_DD = basis_DD.T if broken else inverse_DD
    new = {path: value for path, value in params.items() if not path.startswith(f"attention/{name}/")}
    for path in paths.keys() & new.keys():
        at = paths[path]
        new[path] = np.moveaxis(np.tensordot(inverse_DD, params[path], (1, at)), 0, at)
        if shifted:
            shift_D = np.broadcast_to(_shift(params, name), len(basis_DD))
            add_bias(new, path.rsplit("/", 1)[0], -np.tensordot(shift_D, new[path], (0, at)))
    dense = isinstance(network.layers[number].block.feed_forward, DenseConfig)
    return with_all_biases(new, "feed_forward") if shifted and dense else new


def _write(params: Params, paths: list[str], after: Params, name: str, shifted: bool) -> Params:
    """The parameters with W Q for every W that writes x of the layer with the parameters `after`."""
    basis_DD, shift = matrix(after, name), _shift(after, name)
    new = dict(params)
    for path in paths:
        new[path] = params[path] @ basis_DD
        bias = bias_of(path)
        if bias in params:
            new[bias] = params[bias] @ basis_DD
    if shifted:
        new = with_all_biases(new, "feed_forward")
        new["feed_forward/down/bias"] = new["feed_forward/down/bias"] + shift
    return new


def _embed(network: Network, first: Params, name: str) -> Network:
    """The network with the embedding and its positions in the basis of layer 0."""
    network = untied(network)
    basis_DD = matrix(first, name)
    return network.with_outside({path: network.outside[path] @ basis_DD for path in tables(network)})


def conditions(matrix_name: str) -> str:
    """When a matrix of attention can be dropped."""
    return (
        f"layouts without skips ('no_skip', 'skipless_parallel'), no norm at attention_in, a square and well-conditioned "
        f"{matrix_name} without a bias in layer 0, and other matrices on everything that reads and writes x"
    )
