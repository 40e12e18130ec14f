"""drop_output: W_O moves into W_1 of the same layer, and the output is the concatenated heads o (Graef 2024).

    (o W_O + b_O) W_1 + b_1 = o (W_O W_1) + (b_O W_1 + b_1)

As `fuse_output`, in a layout that keeps the place of W_O ('no_skip'): output='identity' needs as many numbers in the heads
as in the model. Every norm and every skip between W_O and W_1 is in the way; fuse_output.py lists them.
"""

from dataclasses import replace

from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.fuse_output import (
    between,
    check_output,
    into_first,
    output_bias,
    without_output,
)
from xfresearch.surgery.network import Network
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.stream import first_maps


def convert(network: Network, layers, broken: bool = False) -> Network:
    for number in layers:
        block, params = network.layers[number].block, network.params(number)
        where = f"layer {number}"
        refuse_unless(not (term := between(block)), f"{where}: {term}")
        check_output(block, params, where)
        a = block.attention
        refuse_unless(hasattr(a, "output"), f"{where}: a mixer of kind {a.kind!r} always has W_O in this layout")
        heads, size, width = params["attention/output/kernel"].shape
        refuse_unless(heads * size == width, f"{where}: o has {heads} * {size} numbers, and the model has {width}")
    biased = {network.layers[n].block for n in layers if output_bias(network.params(n)).any()}
    readers = {number: first_maps(network.axes(number), "feed_forward") for number in layers}
    return network.change(
        layers,
        lambda block: replace(block, **without_output(block, block in biased)),
        lambda number, block, params: into_first(params, readers[number], block in biased, broken),
    )


DROP_OUTPUT = Conversion(
    name="drop_output",
    about="W_O into W_1 of a layer without a skip or a norm between them",
    conditions="nothing between W_O and W_1, and as many numbers in the heads as in the model; no bias of the output before "
    "experts",
    broken="with the rows of W_O in reverse order",
    convert=convert,
)
