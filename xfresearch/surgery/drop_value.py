"""drop_value: W_V becomes the basis of a skipless layer's input, and value='identity' (Graef 2024).

    x' = x W_V + b_V        value = x'        every other W that reads x: W_V^-1 W

W_V is square only if every head has a value of its own. basis.py has the algebra, and the terms that are in the way
elsewhere.
"""

from xfresearch.surgery.basis import conditions, drop
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.network import Network


def convert(network: Network, layers, broken: bool = False) -> Network:
    return drop(network, layers, "value", broken)


DROP_VALUE = Conversion(
    name="drop_value",
    about="W_V into what writes a skipless layer's input, and its inverse into what else reads it",
    conditions=conditions("W_V"),
    broken="with the transpose of W_V for its inverse",
    convert=convert,
)
