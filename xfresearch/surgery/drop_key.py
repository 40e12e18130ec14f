"""drop_key: W_K becomes the basis of a skipless layer's input, and key='identity' (Graef 2024).

    x' = x W_K + b_K        key = x'        every other W that reads x: W_K^-1 W

W_K is square only if every head has a key of its own. With value='key' the values are x' too. basis.py has the algebra,
and the terms that are in the way elsewhere.
"""

from xfresearch.surgery.basis import conditions, drop
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.network import Network


def convert(network: Network, layers, broken: bool = False) -> Network:
    return drop(network, layers, "key", broken)


DROP_KEY = Conversion(
    name="drop_key",
    about="W_K into what writes a skipless layer's input, and its inverse into what else reads it",
    conditions=conditions("W_K"),
    broken="with the transpose of W_K for its inverse",
    convert=convert,
)
