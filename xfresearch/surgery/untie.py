"""untie: the output head, or an encoder that shares it, gets a copy of the token embedding.

    logits = n E^T        E: the embedding table, n: the final hidden state

The head H = E computes the same, and is then free to change, and so is an encoder's own table. `fold_norm`, `centre` and the
others that write into one of the tables untie them first.
"""

import numpy as np

from xfresearch.surgery.network import TABLE, Network
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion


@conversion(
    "give the output head, or an encoder, a copy of the token embedding",
    conditions="the head is tied to the embedding, or the encoder shares it",
    broken="with the rows of the copy shifted by one",
)
def untie(network: Network, layers, broken: bool = False) -> Network:
    if network.stack:
        shared = network.model.embedding == "shared"
        refuse_unless(shared, "the table is its own already")
        return network.with_outside({TABLE: _copy(network, broken)}, embedding="own")
    refuse_unless(network.model.tie_embeddings, "the output head is not tied to the embedding")
    return untied(network, broken)


def untied(network: Network, broken: bool = False) -> Network:
    """The network with an output head; unchanged if it has one, and for an encoder, which has none."""
    if network.stack or not network.model.tie_embeddings:
        return network
    return network.with_outside({"head/table": _copy(network, broken)}, tie_embeddings=False)


def _copy(network: Network, broken: bool) -> np.ndarray:
    table_VD = network.outside[TABLE]
    return np.roll(table_VD, 1, 0) if broken else table_VD
