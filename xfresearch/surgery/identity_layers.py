"""When a layer computes the identity, and when the number of layers can change."""

from xfresearch.models.block_config import BlockConfig
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.norms import WITH_EPSILON
from xfresearch.surgery.network import Network
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.stream import last_maps


def identity_maps(network: Network, number: int) -> list[str]:
    """Paths of the parameters of a layer that make it the identity if all of them are 0. Raises Refused if none do."""
    block, axes, where = network.layers[number].block, network.axes(number), f"layer {number}"
    found: list[str] = []
    replaced = ""  # the sublayer whose output has replaced the input of the block
    for branch in LAYOUTS[block.layout].branches:
        name = branch.name
        post = f"{name}_post"
        refuse_unless(
            "post" not in branch.norms or block.norm_at(post).kind == "none",
            f"{where}: norms.{post} reads the skip too, and norm(x + 0) is not x",
        )
        refuse_unless(
            not (replaced and branch.connection.adds_to == "stream"),
            f"{where}: layout={block.layout!r} has no skip around {replaced}: x is not added to its output",
        )
        refuse_unless(
            branch.connection.adds_to != "streams",
            f"{where}: layout={block.layout!r} mixes several residual streams, also where {name} writes 0",
        )
        replaced = name if branch.connection.adds_to == "nothing" else ""
        if branch.connection.adds_to != "nothing":
            found += last_maps(block, axes, name, where) + _output_norm(block, name, axes, where)
    refuse_unless(
        not replaced, f"{where}: layout={block.layout!r} has no skip around {replaced}: x is not added to its output"
    )
    return found


def _output_norm(block: BlockConfig, name: str, axes: dict, where: str) -> list[str]:
    """What the norm of a sublayer's output adds to 0: its bias, and derf's shift, since erf(0 + shift) is not 0."""
    site = f"{name}_out"
    if not hasattr(block.norms, site):
        return []
    spec = block.norm_at(site)
    refuse_unless(
        spec.epsilon > 0 or spec.kind not in WITH_EPSILON, f"{where}: norms.{site} without epsilon divides 0 by 0"
    )
    return [path for part in ("bias", "shift") if (path := f"{name}_norm_out/{part}") in axes]


def check_depth(network: Network, first: int) -> None:
    """Raises Refused if a layer depends on the depth, or one from `first` on depends on its number."""
    for number, at in enumerate(network.layers):
        refuse_unless(
            not any(callable(branch.connection.skip.value) for branch in LAYOUTS[at.block.layout].branches),
            f"layer {number}: the factor (2 depth)^(1/4) of the skip in layout={at.block.layout!r} depends on the depth",
        )
        refuse_unless(
            number < first or not any(each.numbered for each in at.block.sublayers.values()),
            f"layer {number}: lambda_0 = 0.8 - 0.6 exp(-0.3 l) of differential attention depends on the layer's number l",
        )
