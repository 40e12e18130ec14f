"""The last step of `centre` with width='less_one': a residual stream without a mean loses a dimension (centre.py)."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from xfresearch.config.fields import with_values
from xfresearch.models.block_config import BlockConfig
from xfresearch.models.feed_forwards.dense import HiddenOptions
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.linear_terms import LinearTerm
from xfresearch.models.mixers.differential import DifferentialConfig
from xfresearch.models.norms import WITH_EPSILON
from xfresearch.models.sublayer import SublayerConfig
from xfresearch.surgery.layer_blocks import LayerBlock
from xfresearch.surgery.network import Network, Params
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.stream_maps import product, readers, tables, with_end
from xfresearch.surgery.widen import with_hidden

Maps = dict[int, list[str]]  # paths of what writes the stream, by layer


def narrowed(network: Network, maps: Maps, centred: Callable[[Network], Network], broken: bool) -> Network:
    """`network`, whose head is not tied, with a residual stream of D - 1 numbers. centred(network) has the norms of a
    stream without a mean."""
    model = network.model
    width = model.width
    _check(network, maps)
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
    changed = _with_epsilons(centred(changed), width / (width - 1)).with_outside(outside, width=width - 1)
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


def _check(network: Network, maps: Maps) -> None:
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
    return isinstance(options, DifferentialConfig) or bool({*options.norm_kinds} - {"none"})
