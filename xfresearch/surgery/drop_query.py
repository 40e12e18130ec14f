"""drop_query: W_Q becomes the basis of a skipless layer's input, and query='identity' (Graef 2024).

    x' = x W_Q + b_Q        query = x'        every other W that reads x: W_Q^-1 W

The query of a head is then its slice of x'. It equals x W_Q + b_Q, so RoPE and norms of queries see no change. basis.py
has the algebra, and the terms that are in the way elsewhere.
"""

from xfresearch.surgery.basis import conditions, drop
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.network import Network


def convert(network: Network, layers, broken: bool = False) -> Network:
    return drop(network, layers, "query", broken)


DROP_QUERY = Conversion(
    name="drop_query",
    about="W_Q into what writes a skipless layer's input, and its inverse into what else reads it",
    conditions=conditions("W_Q"),
    broken="with the transpose of W_Q for its inverse",
    convert=convert,
)
