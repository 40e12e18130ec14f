"""untie: the output head gets a copy of the token embedding.

    logits = n E^T        E: the embedding table, n: the final hidden state

The head H = E computes the same, and is then free to change. `fold_norm`, `centre` and the others that write into one of
the two tables untie them first.
"""

import numpy as np

from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.network import Network
from xfresearch.surgery.refused import refuse_unless


def convert(network: Network, layers, broken: bool = False) -> Network:
    refuse_unless(network.model.tie_embeddings, "the output head is not tied to the embedding")
    return untied(network, broken)


def untied(network: Network, broken: bool = False) -> Network:
    """The network with an output head; unchanged if it has one."""
    if not network.model.tie_embeddings:
        return network
    table_VD = network.outside["embed/table"]
    head_VD = np.roll(table_VD, 1, 0) if broken else table_VD
    return network.with_outside({"head/table": head_VD}, tie_embeddings=False)


UNTIE = Conversion(
    name="untie",
    about="give the output head a copy of the token embedding",
    conditions="the head is tied to the embedding",
    broken="with the rows of the head shifted by one",
    convert=convert,
)
