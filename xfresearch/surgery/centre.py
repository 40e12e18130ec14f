"""centre: removes the mean from everything that writes the residual stream, so that LayerNorm becomes RMSNorm.

    C = I - 1 1^T / D        (x C has mean 0)        layer(x) = rms(x C)        project(x) = x C

The stream x may be replaced by x C if everything that reads it removes the mean anyway: all input norms and the final
norm are of kind 'layer' or 'project'. The stream is a sum, and C is linear, so C goes into every term: the embedding, the
learned positions, and the last kernels and biases of the sublayers:

    (e + p + sum_i h_i W_i + b_i) C = e C + p C + sum_i h_i (W_i C) + b_i C

Then a norm of kind 'layer' is a norm of kind 'rms' with the same epsilon, and 'project' without gain and bias is none.
Where a feed-forward layer reads the output of attention without a norm and no skip adds it, this output is no part of the
stream and keeps its mean.

width='less_one' also drops the dimension that is always 0. With an orthonormal basis Q [D, D - 1] of the vectors with
mean 0, the stream is x Q, writers have W Q, and readers Q^T W. Its RMSNorm is over D - 1 numbers:

    rms(x; eps) = sqrt(D / (D - 1)) rms(x Q; eps D / (D - 1)) Q^T

Readers take the factor. A gain or a bias between would have no place in the smaller space: fold them first.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from xfresearch.models.block_config import BlockConfig, NormSite
from xfresearch.models.connections.connection import Connection
from xfresearch.models.feed_forwards.dense import HiddenOptions
from xfresearch.models.layouts import LAYOUTS, Branch
from xfresearch.models.linear_terms import LinearTerm
from xfresearch.models.norms import HIDDEN, WITH_EPSILON, NormSpec
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.options.fields import with_values
from xfresearch.surgery.layer_blocks import LayerBlock
from xfresearch.surgery.network import Network, Params
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion
from xfresearch.surgery.stream_maps import last_maps, product, readers, tables, with_end
from xfresearch.surgery.untie import untied
from xfresearch.surgery.widen import with_hidden

BLIND = ("layer", "project")  # kinds of norms that do not read the mean
Width = Literal["same", "less_one"]
Maps = dict[int, list[str]]  # paths of the parameters that write the stream, by layer


@conversion(
    "mean removal in everything that writes the residual stream: LayerNorm becomes RMSNorm",
    conditions="all input norms and the final norm are of kind 'layer' or 'project', and only matrices and tables write "
    "the residual stream",
    broken="with the embedding and its positions as they were",
    options={"width": "same, or less_one: the stream loses the dimension that is 0"},
)
def centre(network: Network, layers, broken: bool = False, width: Width = "same") -> Network:
    refuse_unless(len(layers) == len(network.layers), "all layers add to one residual stream: convert all of them")
    _check_outside(network)
    network = network.without_dropout(layers, embedding=True)  # the numbers that dropout leaves have a mean
    blocks = [at.block for at in network.layers]
    maps: Maps = {}
    for number, block in enumerate(blocks):
        maps[number] = [path for name in written(block, f"layer {number}") for path in last_maps(network, number, name)]
    if width == "less_one":
        return _narrowed(untied(network), maps, broken)
    outside = {path: network.outside[path] for path in tables(network)}
    outside = outside if broken else {path: without_mean(value) for path, value in outside.items()}
    centred = untied(network).with_outside(outside)
    centred = centred.change(
        layers,
        lambda block: block,
        lambda number, block, params: params | {path: without_mean(params[path]) for path in maps[number]},
    )
    return _kinds_without_mean(centred)


def without_mean(array_xD: np.ndarray) -> np.ndarray:
    return array_xD - array_xD.mean(-1, keepdims=True)


def _check_outside(network: Network) -> None:
    model = network.model
    refuse_unless(
        model.position != "sinusoidal", "position='sinusoidal' is a fixed table, whose mean is not 0 and cannot be removed"
    )
    refuse_unless(
        model.embedding_norm == "none",
        f"the embedding's norm of kind {model.embedding_norm!r} writes the stream, and its output has a mean (fold_norm "
        "can remove this norm)",
    )
    head = "none" if network.stack else model.head_activation
    refuse_unless(head == "none", f"head_activation={head!r}: the layer before the output matrix is not converted")
    refuse_unless(
        model.final_norm in BLIND, f"the final norm of kind {model.final_norm!r} reads the mean of the residual stream"
    )


def written(block: BlockConfig, where: str) -> list[str]:
    """Names of the sublayers that write the stream. Raises Refused if something reads its mean, or if a norm writes it."""
    names = []
    branches = LAYOUTS[block.layout].branches
    before = True  # whether the tensor before this sublayer is the stream
    for branch, following in zip(branches, (*branches[1:], None), strict=True):
        _check_output_norms(block, branch, where)
        refuse_unless(not branch.connection.reads_mean, f"{where}, layout={block.layout!r}: {branch.connection.reads_mean}")
        if branch.connection.reads == "block" or (branch.connection.reads == "stream" and before):
            _check_reader(block, branch, where)
        before = following is None or _keeps(following.connection) or _blind(block, following)
        names += [branch.name] if before else []
    return names


def _keeps(connection: Connection) -> bool:
    """Whether the sublayer adds to the stream before it, or reads another value."""
    return connection.adds_to == "stream" or connection.reads != "stream"


def _blind(block: BlockConfig, branch: Branch) -> bool:
    return "in" in branch.norms and block.norm_at(f"{branch.name}_in").kind in BLIND


def _check_reader(block: BlockConfig, branch: Branch, where: str) -> None:
    site = f"{branch.name}_in"
    kind = block.norm_at(site).kind if "in" in branch.norms else "none"
    refuse_unless(kind != "none", f"{where}: {branch.name} reads the residual stream without a norm, and so its mean")
    refuse_unless(kind in BLIND, f"{where}: norms.{site} of kind {kind!r} reads the mean of the residual stream")


def _check_output_norms(block: BlockConfig, branch: Branch, where: str) -> None:
    for at, what in (("post", "is the residual stream itself"), ("out", "is added to the residual stream")):
        site = f"{branch.name}_{at}"
        refuse_unless(
            at not in branch.norms or block.norm_at(site).kind == "none",
            f"{where}: the output of norms.{site}, with a mean, {what}",
        )


def _kind_after(spec: NormSpec) -> str:
    """The kind of a norm that reads a stream without a mean."""
    return {"layer": "rms", "project": "project" if spec.affine else "none"}.get(spec.kind, spec.kind)


def _kinds_without_mean(network: Network) -> Network:
    """The network with the kinds of norms that a stream without a mean needs."""
    final = _kind_after(network.norm(network.model.final_norm))
    first = network.layers[0].block
    layers = tuple(
        LayerBlock(at.name, _block_after(at.block, (final,) if at.block == first else ())) for at in network.layers
    )
    changed = final != network.model.final_norm or any(
        new.block != old.block for new, old in zip(layers, network.layers, strict=True)
    )
    refuse_unless(changed, "all norms are of kind 'project' with a gain or a bias, and would stay (fold_norm first)")
    return replace(network, layers=layers, model=replace(network.model, final_norm=final))


def _block_after(block: BlockConfig, elsewhere: tuple[str, ...]) -> BlockConfig:
    """`block` with other kinds of norms. `elsewhere` are kinds of norms outside the blocks with this block's options."""
    sites = {site: getattr(block.norms, site) for site in LAYOUTS[block.layout].sites}
    kinds = {site: _kind_after(block.norm_at(site)) for site in sites}
    inherited = {kinds[site] for site, own in sites.items() if not own.kind}
    common = inherited.pop() if len(inherited) == 1 else ""  # the kind of the norms that have none of their own
    new = {}
    for site, own in sites.items():
        kind = "" if common and not own.kind else kinds[site]
        new[site] = NormSite(kind=kind) if kinds[site] == "none" else replace(own, kind=kind)
    block = with_values(block, {"norm": common or "layer", "norms": replace(block.norms, **new)})
    return _without_unread(block, {*kinds.values(), *elsewhere})


def _without_unread(block: BlockConfig, kinds: set[str]) -> BlockConfig:
    """`block` with the defaults of the options that no norm reads any more."""
    kinds |= {kind for options in block.sublayers.values() for kind in options.norm_kinds}
    names = [] if kinds - {"none", HIDDEN} else ["norm_gain", "norm_bias", "norm_offset"]
    names += [] if kinds - {"none"} else ["norm_cast"]
    return with_values(block, {name: BlockConfig.__dataclass_fields__[name].default for name in names})


def _narrowed(network: Network, maps: Maps, broken: bool) -> Network:
    """`network`, whose head is not tied, with a residual stream of D - 1 numbers."""
    model = network.model
    width = model.width
    _check_narrower(network, maps)
    basis_DE = basis(width)
    reads = {number: _readers(network, number) for number in range(len(network.layers))}
    factor = np.sqrt(width / (width - 1))

    def params(number: int, block: BlockConfig, old: Params) -> Params:
        new = old | {path: old[path] @ basis_DE for path in maps[number]}
        for term, kind in reads[number]:
            kernel = product(basis_DE.T, new[term.kernel], term.reads[0])
            new[term.kernel] = kernel * (factor if kind == "layer" else 1.0)
        return new

    table = {path: network.outside[path] for path in tables(network)}
    outside = {path: each[:, :-1] if broken else each @ basis_DE for path, each in table.items()}
    if model.embedding_scale == "sqrt_width":  # the root of the smaller width is smaller
        outside["embed/table"] = outside["embed/table"] * factor
    of_end = factor if model.final_norm == "layer" else 1.0
    if not network.stack and model.head_scale == "inverse_sqrt_width":
        of_end /= factor
    changed = network.change(range(len(network.layers)), _with_own_sizes, params)
    changed = _with_epsilons(_kinds_without_mean(changed), width / (width - 1)).with_outside(outside, width=width - 1)
    return with_end(changed, of_end * basis_DE.T, np.zeros(width))


def _with_own_sizes(block: BlockConfig) -> BlockConfig:
    """`block` with hidden sizes that do not depend on the width."""
    hidden = {name: each for name, each in block.sublayers.items() if isinstance(each, HiddenOptions)}
    return with_values(block, {name: with_hidden(each, each.hidden) for name, each in hidden.items()})


def basis(width: int) -> np.ndarray:
    """An orthonormal basis [D, D - 1] of the vectors with mean 0: the columns after the first of a reflection that maps
    the first unit vector to (1, ..., 1) / sqrt(D)."""
    normal_D = -np.full(width, width**-0.5)
    normal_D[0] += 1
    reflection_DD = np.eye(width) - 2 * np.outer(normal_D, normal_D) / (normal_D @ normal_D)
    return reflection_DD[:, 1:]


def _check_narrower(network: Network, maps: Maps) -> None:
    final = network.norm(network.model.final_norm)
    refuse_unless(not final.affine, "width='less_one': the final norm has a gain or a bias of size D (fold_norm first)")
    for number, at in enumerate(network.layers):
        where, block = f"width='less_one': layer {number}", at.block
        written = {path.split("/")[0] for path in maps[number]}
        for branch in LAYOUTS[block.layout].branches:
            name, options = branch.name, getattr(block, branch.name)
            site = f"{name}_in"
            affine = "in" in branch.norms and block.norm_at(site).affine
            refuse_unless(not affine, f"{where}: norms.{site} has a gain or a bias of size D (fold_norm first)")
            refuse_unless(
                name in written or branch.bare,
                f"{where}: the output of {name} is no part of the stream, and its D numbers have a mean",
            )
            for part, kind in options.identities.items():
                other = part == "output" or part in options.of_source
                refuse_unless(other, f"{where}: {part}={kind!r} reads the D numbers of the stream without a matrix")


def _readers(network: Network, number: int) -> list[tuple[LinearTerm, str]]:
    """The linear terms that read the stream, each with the kind of the norm before."""
    terms, kind, bare = [], "", False
    block = network.layers[number].block
    for branch in LAYOUTS[block.layout].branches:
        name = branch.name
        kind = block.norm_at(f"{name}_in").kind if "in" in branch.norms else kind
        if not bare:
            terms += [(term, kind) for term in readers(network, number, name)]
        bare = branch.bare  # the next sublayer reads heads, and no stream
    return terms


def _with_epsilons(network: Network, ratio: float) -> Network:
    """The network whose norms of the stream have `ratio` times the epsilon."""
    final = network.model.final_norm in WITH_EPSILON
    first = network.layers[0].block
    layers = []
    for number, at in enumerate(network.layers):
        block = at.block
        outside = final and block == first  # the final norm has the options of the first block
        sites = [site for site in LAYOUTS[block.layout].sites if block.norm_at(site).kind in WITH_EPSILON]
        alone = not any(_has_norm(options) for options in block.sublayers.values())
        refuse_unless(
            alone or not outside,
            f"width='less_one': layer {number}: the final norm shares its epsilon, which changes, with a norm inside a "
            "sublayer",
        )
        new = {
            site: replace(getattr(block.norms, site), epsilon=ratio * block.norm_at(site).epsilon) for site in sites
        }
        epsilon = block.norm_epsilon * (ratio if outside else 1.0)
        changes = {"norm_epsilon": epsilon, "norms": replace(block.norms, **new)}
        layers.append(LayerBlock(at.name, with_values(block, changes)))
    return replace(network, layers=tuple(layers))


def _has_norm(options: SublayerConfig) -> bool:
    """Whether a sublayer has a norm inside, with the epsilon of the block's norms."""
    return bool({*options.norm_kinds} - {"none"})
