"""drop_query, drop_key, drop_value and drop_output: matrices of attention that disappear without skips (Graef 2024).

    drop_query    x' = x W_Q + b_Q      query = x'      every other W that reads x: W_Q^-1 W
    drop_key      x' = x W_K + b_K      key = x'        every other W that reads x: W_K^-1 W
    drop_value    x' = x W_V + b_V      value = x'      every other W that reads x: W_V^-1 W

The query of a head is then its slice of x'. It equals x W_Q + b_Q, so RoPE and norms of queries see no change. W_K and W_V
are square only if every head has a key and a value of its own. With value='key' the values are x' too. basis.py has the
algebra, and the terms that are in the way elsewhere.

    drop_output   (o W_O + b_O) W_1 + b_1 = o (W_O W_1) + (b_O W_1 + b_1)

is `fuse_output` in a layout that keeps the place of W_O ('no_skip'): output='identity' needs as many numbers in the heads as
in the model. Every norm and every skip between W_O and W_1 is in the way; fuse_output.py lists them.

The layouts with cross-attention have skips, but `drop_query` needs no inverse there (across.py).
"""

from dataclasses import replace

from xfresearch.surgery.across import without_matrix
from xfresearch.surgery.basis import drop
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.fuse_output import between, check, fused
from xfresearch.surgery.network import ATTENDING, Network, Target
from xfresearch.surgery.refused import Refused, refuse_unless

ACROSS = "; in cross-attention"  # in the conditions


def _conversion(name: str, across: str) -> Conversion:
    """The conversion that drops the matrix of queries, keys or values. `across`: when it is exact in cross-attention."""
    symbol = f"W_{name[0].upper()}"

    def convert(network: Network, sublayers: list[Target], broken: bool = False) -> Network:
        cross = [each for each in sublayers if each.role == "cross"]
        layers = [each.number for each in sublayers if each.role != "cross"]
        try:
            network = drop(network, layers, name, broken) if layers else network
        except Refused as refused:
            alone = " (role='cross' is for cross-attention alone)" if cross and name == "query" else ""
            raise Refused(f"{refused}{alone}") from refused
        return without_matrix(network, network.again(cross), name, broken)

    return Conversion(
        name=f"drop_{name}",
        about=f"{symbol} into what writes a skipless layer's input, and its inverse into what else reads it",
        conditions=f"layouts without skips ('no_skip', 'skipless_parallel'), no norm at attention_in, a square and "
        f"well-conditioned {symbol} without a bias in layer 0, and other matrices on everything that reads and writes x"
        f"{ACROSS} {across}",
        broken=f"with the transpose of {symbol} for its inverse",
        convert=convert,
        roles=ATTENDING,
    )


def without_output(network: Network, sublayers: list[Target], broken: bool = False) -> Network:
    for each in sublayers:
        if each.role == "cross":
            raise Refused(f"{each.where}: {between(network.layers[each.number].block, 'cross')}")
        check(network, each.number)
        mixer, where = network.only("mixer", each.number), f"layer {each.number}"
        kind = mixer.options.kind
        refuse_unless(hasattr(mixer.options, "output"), f"{where}: a mixer of kind {kind!r} always has W_O in this layout")
        heads, size, width = network.inside(mixer)["output/kernel"].shape
        refuse_unless(heads * size == width, f"{where}: o has {heads} * {size} numbers, and the model has {width}")
    return fused(network, [each.number for each in sublayers], broken, replace)


DROP_QUERY = _conversion("query", "W_Q moves into W_K, if the query has no bias, norm or clipping")
DROP_KEY = _conversion("key", "merge_query_key")
DROP_VALUE = _conversion("value", "absorb_value_output")
DROP_OUTPUT = Conversion(
    name="drop_output",
    about="W_O into W_1 of a layer without a skip or a norm between them",
    conditions="nothing between W_O and W_1, and as many numbers in the heads as in the model",
    broken="with the rows of W_O in reverse order",
    convert=without_output,
    roles=ATTENDING,
)
