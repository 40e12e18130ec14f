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
"""

from dataclasses import replace

from xfresearch.surgery.basis import drop
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.fuse_output import check, fused
from xfresearch.surgery.network import Network
from xfresearch.surgery.refused import refuse_unless


def _conversion(name: str) -> Conversion:
    """The conversion that drops the matrix of queries, keys or values."""
    symbol = f"W_{name[0].upper()}"

    def convert(network: Network, layers, broken: bool = False) -> Network:
        return drop(network, layers, name, broken)

    return Conversion(
        name=f"drop_{name}",
        about=f"{symbol} into what writes a skipless layer's input, and its inverse into what else reads it",
        conditions=f"layouts without skips ('no_skip', 'skipless_parallel'), no norm at attention_in, a square and "
        f"well-conditioned {symbol} without a bias in layer 0, and other matrices on everything that reads and writes x",
        broken=f"with the transpose of {symbol} for its inverse",
        convert=convert,
    )


def without_output(network: Network, layers, broken: bool = False) -> Network:
    for number in layers:
        check(network, number)
        mixer, where = network.only("mixer", number), f"layer {number}"
        kind = mixer.options.kind
        refuse_unless(hasattr(mixer.options, "output"), f"{where}: a mixer of kind {kind!r} always has W_O in this layout")
        heads, size, width = network.inside(mixer)["output/kernel"].shape
        refuse_unless(heads * size == width, f"{where}: o has {heads} * {size} numbers, and the model has {width}")
    return fused(network, layers, broken, replace)


DROP_QUERY, DROP_KEY, DROP_VALUE = (_conversion(name) for name in ("query", "key", "value"))
DROP_OUTPUT = Conversion(
    name="drop_output",
    about="W_O into W_1 of a layer without a skip or a norm between them",
    conditions="nothing between W_O and W_1, and as many numbers in the heads as in the model",
    broken="with the rows of W_O in reverse order",
    convert=without_output,
)
