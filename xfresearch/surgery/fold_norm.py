"""fold_norm: the gain and the bias of a norm move into the linear maps that read it.

    norm(x) = g h(x) + b                            h: the norm without its parameters, g: offset + gain
    norm(x) W + c = h(x) diag(g) W + (b W + c)

This is exact if every reader of the norm is a linear map with a trained matrix, and has a place for a bias where b is not
0. The norm of a sublayer's input is read by this sublayer, and in parallel layouts by the next one too. The output of an
'out' or 'post' norm is added to the residual stream, or is the residual stream: no linear map reads it alone, so its gain
stays. DyT is tanh(alpha x) and Derf erf(alpha x + shift), and alpha and the shift stay inside.

query='merged' has the normed input on both sides of one matrix per head:

    (g h + b) W (g h' + b)^T = h diag(g) W diag(g) h'^T + b W diag(g) h'^T + terms that do not depend on h'

The softmax cancels the last terms, so b W diag(g) becomes the bias of the query. Slots and sinks do not have these terms,
and with a softcap they do not cancel: refused. Slots and relative keys have keys of their own, which do not take the second
diag(g), and value='key' is g h + b itself: refused, too.

The final norm moves into an untied head, n (g h + b) E^T = h (E diag(g))^T + b E^T, and that of an encoder into W_K and W_V
of all cross-attention (source_readers.py). Without positions at the embedding, the embedding's norm is a function of the
token alone, and the whole norm moves into the table.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.mixers.memory_slots import softmax_slots
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.norms import WITH_ALPHA, NormSpec
from xfresearch.options.fields import with_values
from xfresearch.surgery.biases import add_bias, check_places, with_all_biases, with_biases
from xfresearch.surgery.network import Network, Params, names_of
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion
from xfresearch.surgery.stream_maps import readers, with_end
from xfresearch.surgery.untie import untied

OUTSIDE = ("final_norm", "embedding_norm")


@conversion(
    "gain and bias of input norms, of the final norm and of the embedding's norm into the linear maps that read them",
    conditions="every reader of the norm is a trained matrix, with a place for a bias if the norm has one",
    broken="with the gain lost",
)
def fold_norm(network: Network, layers, broken: bool = False) -> Network:
    whole = len(layers) == len(network.layers)
    outside = [name for name in OUTSIDE if whole and network.norm(getattr(network.model, name)).affine]
    inside = [number for number in layers if sites(network.layers[number].block)]
    refuse_unless(bool(inside or outside), _nothing(network, layers))
    by_block: dict[BlockConfig, set[str]] = {network.layers[number].block: set() for number in inside}
    for number in inside:
        by_block[network.layers[number].block] |= _check(network, number)
    folded = network.change(
        inside,
        lambda block: _without(block, by_block[block]),
        lambda number, block, params: _folded(network, number, block, params, by_block[block], broken),
    )
    if "embedding_norm" in outside:
        folded = _into_embedding(folded, broken)
    return _into_end(folded, broken) if "final_norm" in outside else folded


def sites(block: BlockConfig) -> dict[str, list[str]]:
    """{sublayer: the sublayers that read its input norm}, for each input norm with a gain or a bias."""
    by_branch = {}
    branches = LAYOUTS[block.layout].branches
    for index, branch in enumerate(branches):
        if "in" in branch.norms and block.norm_at(f"{branch.name}_in").affine:
            after = branches[index + 1 :]
            by_branch[branch.name] = [branch.name, *(each.name for each in after if each.connection.reads == "before")]
    return by_branch


def _nothing(network: Network, layers) -> str:
    """Why no norm can be folded."""
    block = network.layers[layers[0]].block
    others = [site for site in LAYOUTS[block.layout].sites if block.norm_at(site).affine]
    if others:
        return (
            f"norms.{others[0]} writes the residual stream, which the skip adds to: x + g h(f(x)) has no linear map that "
            "reads g h alone"
        )
    return "no norm has a gain or a bias"


def _gain_and_bias(params: Params, prefix: str, spec: NormSpec, width: int) -> tuple[np.ndarray, np.ndarray]:
    gain_D = params.get(f"{prefix}/gain")
    gain_D = np.ones(width) if gain_D is None else spec.offset + gain_D
    return gain_D, params.get(f"{prefix}/bias", np.zeros(width))


def _check(network: Network, number: int) -> set[str]:
    """Paths of the biases that a layer needs. Raises Refused if a norm cannot be folded."""
    block, params = network.layers[number].block, network.params(number)
    needed = set()
    for sublayer, names in sites(block).items():
        gain_D, bias_D = _gain_and_bias(
            params, f"{sublayer}_norm_in", block.norm_at(f"{sublayer}_in"), network.model.width
        )
        for name in names:
            options = getattr(block, name)
            _check_identities(options, gain_D, bias_D, f"layer {number}, {name}")
            if bias_D.any():
                terms = readers(network, number, name)
                check_places(options, {term.part for term in terms}, f"layer {number}, {name}: the norm's bias")
                needed |= {term.bias for term in terms}
    return needed


def _check_identities(options, gain_D, bias_D, where: str) -> None:
    """Raises Refused if a reader of the norm has no matrix, or cannot take the norm's bias."""
    trivial = (gain_D == 1).all() and not bias_D.any()
    for name, kind in options.identities.items():
        if name in options.of_source:  # not of the stream, which the norm is of
            continue
        takes = name == "output" or name == "key" and options.both_sides
        refuse_unless(takes or trivial, f"{where}: {name}={kind!r} has no matrix that could take the norm's gain")
    if options.both_sides and not options.of_source:
        _check_both_sides(options, gain_D, bias_D, where)


def _check_both_sides(a: SoftmaxConfig, gain_D, bias_D, where: str) -> None:
    """Raises Refused if the gain and the bias cannot be on both sides of W_h, where the key is the normed x itself."""
    gained, biased = (gain_D != 1).any(), bias_D.any()
    cancels = f"{where}: b W_h diag(g) h^T leaves terms that the softmax over the context cancels, and"
    constant = a.memory_slots or a.sink != "none"
    refuse_unless(not (biased and constant), f"{cancels} slots or a sink do not")
    refuse_unless(not (biased and a.softcap), f"{cancels} softcap={a.softcap} does not")
    refuse_unless(
        not (gained or biased) or a.value != "key",
        f"{where}: value='key' is g h + b itself, and no matrix could take the norm's gain",
    )
    once = f"{where}: diag(g) W_h diag(g) is for keys that are h, and"
    refuse_unless(not (gained and softmax_slots(a)), f"{once} those of slots are trained")
    refuse_unless(not (gained and a.position == "relative_key"), f"{once} relative keys are trained")


def _without(block: BlockConfig, needed: set[str]) -> BlockConfig:
    """The block without the gains and biases of its input norms, and with the biases that readers need."""
    norms = {}
    for sublayer in sites(block):
        site = f"{sublayer}_in"
        parts = {name for name, exists in block.norm_at(site).parts.items() if exists} - {"alpha", "shift"}
        norms[site] = replace(getattr(block.norms, site), **dict.fromkeys(parts, False))
    new = {"norms": replace(block.norms, **norms)}
    for name, options in block.sublayers.items():
        parts = {path.split("/")[1] for path in needed if path.startswith(f"{name}/")}
        new[name] = with_biases(options, parts) if parts else options
    return replace(block, **new)


def _folded(network: Network, number: int, block: BlockConfig, params: Params, needed: set[str], broken: bool) -> Params:
    new = dict(params)
    for sublayer, names in sites(block).items():
        prefix = f"{sublayer}_norm_in"
        gain_D, bias_D = _gain_and_bias(params, prefix, block.norm_at(f"{sublayer}_in"), network.model.width)
        new = {path: value for path, value in new.items() if path not in (f"{prefix}/gain", f"{prefix}/bias")}
        for term in readers(network, number, *names):
            kernel = params[term.kernel]
            if term.bias in needed:
                image = np.tensordot(bias_D, kernel, (0, term.reads[0]))
                add_bias(new, term.bias, image * gain_D if len(term.reads) > 1 else image)  # the other token is h alone
            for at in () if broken else term.reads:
                kernel = kernel * gain_D.reshape([-1 if axis == at else 1 for axis in range(kernel.ndim)])
            new[term.kernel] = kernel
    biased = {path.split("/")[0] for path in needed} & {*names_of(block, "feed_forward")}
    return with_all_biases(new, network.terms(number, *biased))


def _into_end(network: Network, broken: bool) -> Network:
    """The network with the final norm's gain and bias in the head, or in cross-attention."""
    last = network.layers[-1].block
    connection = LAYOUTS[last.layout].branches[-1].connection
    reader = "cross-attention" if network.stack else "the head"
    head = "none" if network.stack else network.model.head_activation
    refuse_unless(head == "none", f"head_activation={head!r}: a layer is between the final norm and the output matrix")
    refuse_unless(
        connection.ends_in_norm,
        f"{reader} reads {connection.end_formula} with layout={last.layout!r}, not the norm alone",
    )
    network = untied(network)
    spec = network.norm(network.model.final_norm)
    gain_D, bias_D = _gain_and_bias(network.outside, "final_norm", spec, network.model.width)
    network = with_end(network, np.diag(np.ones_like(gain_D) if broken else gain_D), bias_D)
    network = network.with_outside({"final_norm/gain": None, "final_norm/bias": None})
    return _first_block_without(network)


def _first_block_without(network: Network) -> Network:
    """Switches off the gain and the bias in the first block's options, which are also those of the norms outside the blocks.
    Norms of the first block that keep them get options of their own. Norms of queries and keys have no such options."""
    first = network.layers[0]
    block = first.block
    inner = [
        kind for options in block.sublayers.values() for kind in options.norm_kinds if kind not in ("none", "hidden")
    ]
    refuse_unless(
        not inner or not (block.norm_gain or block.norm_bias),
        "the final norm shares its options with the norms of queries and keys, which keep their gain; give --layers to "
        "fold the norms of the layers only",
    )
    kept = {}
    for site in LAYOUTS[block.layout].sites:
        spec = block.norm_at(site)
        refuse_unless(not spec.offset or not spec.parts["gain"], f"norms.{site} keeps a gain with an offset")
        if spec.kind != "none":
            kept[site] = replace(getattr(block.norms, site), gain=spec.gain or None, bias=spec.bias or None)
    without = {"norm_gain": False, "norm_bias": False, "norm_offset": 0.0}
    new = with_values(block, without | {"norms": replace(block.norms, **kept)})
    layers = tuple(replace(at, block=new) if at.block == block else at for at in network.layers)
    return replace(network, layers=layers)


def _into_embedding(network: Network, broken: bool) -> Network:
    """The network with the whole norm of the embedding in the table."""
    model, spec = network.model, network.norm(network.model.embedding_norm)
    refuse_unless(
        spec.kind not in WITH_ALPHA,
        f"embedding_norm of kind {spec.kind!r}: tables are made for means and lengths, not for tanh or erf",
    )
    refuse_unless(
        model.position == "none",
        f"embedding_norm reads the token's embedding plus position={model.position!r}, and no table has their norm",
    )
    types = 0 if network.stack else model.token_types
    refuse_unless(not types, "embedding_norm reads the sum of the tables of tokens and of token types")
    network = untied(network)
    table_VD = network.outside["embed/table"] * _scale(network)
    gain_D, bias_D = _gain_and_bias(network.outside, "embedding_norm", spec, model.width)
    centred_VD = table_VD - table_VD.mean(-1, keepdims=True) if spec.kind in ("layer", "project") else table_VD
    if spec.kind != "project":
        centred_VD = centred_VD / np.sqrt(np.square(centred_VD).mean(-1, keepdims=True) + spec.epsilon)
    removed = [path for path in network.outside if path.startswith(("embedding_norm/", "embedding_scale"))]
    new: dict[str, np.ndarray | None] = dict.fromkeys(removed)
    new["embed/table"] = (centred_VD if broken else centred_VD * gain_D) + bias_D
    return network.with_outside(new, embedding_norm="none", embedding_scale="none")


def _scale(network: Network) -> float:
    """The factor of the token embedding."""
    kind = network.model.embedding_scale
    return {"none": 1.0, "sqrt_width": network.model.width**0.5}.get(kind) or float(network.outside["embedding_scale"])
