"""factor_query_key: the merged matrix of a head becomes two factors of rank r. Inverse of `merge_query_key`.

    (x W_h + b_h) y^T = (x A_h + a_h) (y B)^T        W_h = A_h B^T,  b_h = a_h B^T

The heads of a group share B [D, r]. With the rows of all their W_h and b_h below each other,

    M = [W_1; b_1; W_2; b_2; ...] = U S V^T          A = U sqrt(S),  B = V sqrt(S)

by the singular value decomposition. This is exact if the rank of M is at most r. rank=0 takes the smallest exact rank, the
largest over groups and layers. A smaller rank is an approximation, the best one in the spectral norm (Eckart & Young 1936):
the logit of x and y changes by at most |x| |y| |M - A B^T|, the first singular value left out, which is in the certificate.
A matrix that was merged and then saved in float32 has full rank by rounding: give the size of the heads as the rank.

A slot with key m becomes m B, since (x W_h + b_h) m^T = (x A_h + a_h) (m B)^T. Relative keys read x W_h itself, of size D.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.mixers.memory_slots import slot_heads, softmax_slots
from xfresearch.models.mixers.softmax.config import Attending
from xfresearch.surgery.conversion import Conversion, Option
from xfresearch.surgery.network import ATTENDING, Network, Params, Target
from xfresearch.surgery.refused import refuse_unless

EXACT = 1e-12  # singular values below this, relative to the largest, are rounding errors of float64


def convert(network: Network, mixers: list[Target], broken: bool = False, rank: int = 0) -> Network:
    for each in mixers:
        _check(each.options, each.where)
    spectra = {each: _spectra(each.options, network.inside(each)) for each in mixers}
    smallest = {each: max(int((s > EXACT * s[0]).sum()) for s in spectra[each]) for each in mixers}
    width = min(min(each.width, each.read_width) for each in mixers)
    refuse_unless(
        0 <= rank <= width, f"rank={rank} is not between 1 and the width {width}, or 0 for the smallest exact one"
    )
    for each in mixers:
        if 0 < rank < smallest[each]:
            network.figures[f"{each.where}, largest |W_h - A_h B^T|"] = float(max(s[rank] for s in spectra[each]))
        exact = f"W_h with b_h has rank {smallest[each]}"
        full = not rank and smallest[each] >= width
        refuse_unless(not full, f"{each.where}: {exact}, the width: two factors are not smaller (rank={width} makes them)")
    rank = rank or max(1, *smallest.values())  # matrices of zeros have rank 0, which would be the full rank
    return network.change_each(
        mixers,
        lambda each: _factored(each.options, rank),
        lambda each, params: _factor(each.options, params, rank, broken),
    )


def _check(a, where: str) -> None:
    softmax = isinstance(a, Attending)
    refuse_unless(softmax, f"{where}: a mixer of kind {a.kind!r} has no merged matrix W_h")
    refuse_unless(a.query == "merged", f"{where}: query={a.query!r} is no merged matrix W_h (merge_query_key first)")
    refuse_unless(not a.rank, f"{where}: W_h has factors of rank {a.rank} already")
    refuse_unless(a.position != "relative_key", f"{where}: x W_h r_(l - s)^T: relative keys read x W_h itself")


def _stacked(a: Attending, params: Params) -> np.ndarray:
    """M [G, R, D]: the rows of W_h and b_h of each group."""
    kernel_DHE = params["query/kernel"]
    bias_HE = params.get("query/bias", np.zeros(kernel_DHE.shape[1:]))
    rows_HRE = np.concatenate([kernel_DHE.swapaxes(0, 1), bias_HE[:, None]], 1)
    return rows_HRE.reshape(a.kv_heads, -1, rows_HRE.shape[-1])


def _spectra(a: Attending, params: Params) -> list[np.ndarray]:
    """The singular values of each group."""
    return [np.linalg.svd(rows_RE, compute_uv=False) for rows_RE in _stacked(a, params)]


def _factored(a: Attending, rank: int) -> Attending:
    # value='key' was x itself, the key of a merged matrix
    value = "identity_whole" if a.value == "key" else a.value
    heads = "each" if softmax_slots(a) else a.memory_heads
    return replace(a, rank=rank, key="learned", value=value, memory_heads=heads)


def _factor(a: Attending, params: Params, rank: int, broken: bool) -> Params:
    width = params["query/kernel"].shape[0]
    queries, keys = [], []  # of each group
    for rows_RE in _stacked(a, params):
        left, sizes, right = np.linalg.svd(rows_RE, full_matrices=False)
        root_r = np.sqrt(sizes[:rank])
        queries.append((left[:, :rank] * root_r).reshape(-1, width + 1, rank))
        keys.append(right[:rank].T * (1.0 if broken else root_r))
    query_HRr, key_DGr = np.concatenate(queries), np.stack(keys, 1)
    new = params | {"query/kernel": query_HRr[:, :width].swapaxes(0, 1), "key/kernel": key_DGr}
    if "query/bias" in params:
        new["query/bias"] = query_HRr[:, width]
    return new | (_slots(a, params, key_DGr) if softmax_slots(a) else {})


def _slots(a: Attending, params: Params, key_DGr: np.ndarray) -> Params:
    """The slots with keys m B for each group. Keys are stored over the root of their size."""
    stored_MGD, stored_MGV = params["memory/key"], params["memory/value"]
    shape = (a.memory_slots, a.kv_heads)
    key_MGD = np.broadcast_to(stored_MGD, (*shape, stored_MGD.shape[-1]))
    key_MGr = np.einsum("mgd,dgr->mgr", key_MGD, key_DGr) * np.sqrt(key_DGr.shape[0] / key_DGr.shape[-1])
    slots = {"memory/key": key_MGr}
    if slot_heads(a) == 1:
        slots["memory/value"] = np.broadcast_to(stored_MGV, (*shape, stored_MGV.shape[-1]))
    return slots


FACTOR_QUERY_KEY = Conversion(
    name="factor_query_key",
    about="the merged matrix of each head as two factors, with one factor of the key for each group",
    conditions="query='merged' at full rank, without relative keys, and matrices with a rank of at most r",
    broken="without the roots of the singular values in the factor of the key",
    convert=convert,
    roles=ATTENDING,
    approximate=lambda rank: rank > 0,
    options={"rank": Option(0, "rank r of the factors; 0 for the smallest exact one, below which it is an approximation")},
)
