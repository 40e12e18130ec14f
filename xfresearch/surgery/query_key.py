"""merge_query_key and factor_query_key: the matrices of queries and keys as one matrix per head, and the inverse.

`merge_query_key` multiplies them:

    (x W_Q + b_Q) (y W_K + b_K)^T = x W_Q W_K^T y^T + b_Q W_K^T y^T + (x W_Q + b_Q) b_K^T

x is the token of the query, y the token of the key. The last term is the same for every y, so the softmax over the context
cancels it. W_h = W_Q W_K^T of size D x D and the bias b_Q W_K^T remain. Heads of a group share W_K, and each gets its own
W_h. In cross-attention y is the output of the encoder, of its width W, and W_h = W_Q W_K^T has the size D x W: it is the
only map between the two stacks in the logits.

A slot with key m has no W_K. If the other logits lose the last term, the logit of the slot must lose it too:

    (x W_Q + b_Q) (m - b_K)^T = (x W_Q + b_Q) W_K^T m'^T      m' = (m - b_K) (W_K^T W_K)^-1 W_K^T

which is exact if the columns of W_K are independent. The zero logit of a sink has no such m', and softcap is not linear:
both are refused if b_K is not 0.

RoPE rotates between the two matrices: x W_Q R(l - s) W_K^T y^T has a different matrix for every distance. A norm of
queries or keys divides by a length, clipping is not linear, and relative keys read the query alone.

`factor_query_key` makes two factors of rank r of the merged matrix of a head:

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

from xfresearch.models.mixers.memory_slots import softmax_slots
from xfresearch.models.mixers.softmax.config import Attending
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.surgery.key_value_groups import group_of_heads, pseudo_inverses
from xfresearch.surgery.network import ATTENDING, Network, Params, Target
from xfresearch.surgery.refused import refuse_unless
from xfresearch.surgery.registry import conversion

TERMS = {
    "rope": "x W_Q R(l - s) W_K^T y^T: RoPE's rotation gives another matrix for every distance l - s",
    "relative_key": "x W_Q r_(l - s)^T: relative keys read the query without W_K",
}
EXACT = 1e-12  # singular values below this, relative to the largest, are rounding errors of float64


@conversion(
    "W_Q W_K^T as one matrix per head",
    conditions="softmax attention without RoPE, relative keys, norms or clipping of queries and keys; no bias of the key "
    "under a sink or a softcap",
    broken="with the rows of each matrix in reverse order",
    roles=ATTENDING,
)
def merge_query_key(network: Network, mixers: list[Target], broken: bool = False) -> Network:
    for each in mixers:
        _check_merge(each.options, network.inside(each), each.where)
    return network.change_each(
        mixers,
        lambda each: _merged(each.options),
        lambda each, params: _merge(each, params, network.figures, broken),
    )


def _check_merge(a, params: Params, where: str) -> None:
    softmax = isinstance(a, Attending)
    refuse_unless(softmax, f"{where}: a mixer of kind {a.kind!r} has no logits x W_Q W_K^T y^T")
    learned = (a.query, a.key) == ("learned", "learned")
    refuse_unless(learned, f"{where}: query={a.query!r} and key={a.key!r} are not both matrices")
    refuse_unless(a.position not in TERMS, f"{where}: {TERMS.get(a.position)}")
    refuse_unless(a.qk_norm == "none", f"{where}: the norm of queries and keys divides x W_Q by its length")
    refuse_unless(not a.clip, f"{where}: clip is not linear in x W_Q")
    biased = params.get("key/bias", np.zeros(1)).any()
    instead = {"sink": " (sink_to_slot first)"}
    for option, default in (("sink", "none"), ("softcap", 0.0)):
        given = getattr(a, option)
        refuse_unless(
            given == default or not biased,
            f"{where}: the term (x W_Q + b_Q) b_K^T of the key's bias does not cancel with {option}={given!r}"
            f"{instead.get(option, '')}",
        )


def _merged(a: Attending) -> Attending:
    bias = [name for name in a.bias if name != "key"]
    value = "learned" if a.value == "key" else a.value
    bias += ["value"] if a.value == "key" and "key" in a.bias else []
    heads = "each" if softmax_slots(a) else a.memory_heads
    return replace(a, query="merged", key="identity_whole", value=value, bias=tuple(bias), memory_heads=heads)


def _merge(target: Target[Attending], params: Params, figures: dict[str, float], broken: bool) -> Params:
    a, widths = target.options, (target.width, target.read_width)
    query_DHK, key_DGK = params["query/kernel"], params["key/kernel"]
    key_DHK = key_DGK[:, group_of_heads(a)]
    change = logit_scale(a, *widths) / logit_scale(_merged(a), *widths)
    merged_HDD = change * query_DHK.swapaxes(0, 1) @ key_DHK.transpose(1, 2, 0)
    new = {path: value for path, value in params.items() if not path.startswith("key/")}
    new["query/kernel"] = (merged_HDD[:, ::-1] if broken else merged_HDD).swapaxes(0, 1)
    if "query" in a.bias:
        new["query/bias"] = change * np.einsum("hk,ehk->he", params["query/bias"], key_DHK)
    if a.value == "key":
        keys = {path: value for path, value in params.items() if path.startswith("key/")}
        new |= {path.replace("key/", "value/"): value for path, value in keys.items()}
    if softmax_slots(a):
        new |= _merged_slots(target, params, figures)
    return new


def _merged_slots(target: Target[Attending], params: Params, figures: dict[str, float]) -> Params:
    """The slots as keys [M, G, D] of the width of the model, m' above. The logits of slots have the same scale, so m' is
    in the units of W_K. Slots are stored over the root of the size of their keys."""
    a = target.options
    key_DGK = params["key/kernel"]
    bias_GK = params.get("key/bias", np.zeros(key_DGK.shape[1:]))
    size, groups, width = a.head_size, a.kv_heads, len(key_DGK)
    stored_MGK = np.broadcast_to(params["memory/key"], (a.memory_slots, groups, size))
    slots_MGK = np.sqrt(size) * stored_MGK - bias_GK
    inverse_GKD = pseudo_inverses(key_DGK, figures, f"{target.where}, W_K")
    key_MGD = np.einsum("mgk,gkd->mgd", slots_MGK, inverse_GKD) / np.sqrt(width)
    return {"memory/key": key_MGD, "memory/value": _values_of_groups(a, params)}


@conversion(
    "the merged matrix of each head as two factors, with one factor of the key for each group",
    conditions="query='merged' at full rank, without relative keys, and matrices with a rank of at most r",
    broken="without the roots of the singular values in the factor of the key",
    roles=ATTENDING,
    approximate=lambda rank: rank > 0,
    options={"rank": "rank r of the factors; 0 for the smallest exact one, below which it is an approximation"},
)
def factor_query_key(network: Network, mixers: list[Target], broken: bool = False, rank: int = 0) -> Network:
    for each in mixers:
        _check_factor(each.options, each.where)
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


def _check_factor(a, where: str) -> None:
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
    return new | (_factored_slots(a, params, key_DGr) if softmax_slots(a) else {})


def _factored_slots(a: Attending, params: Params, key_DGr: np.ndarray) -> Params:
    """The slots with keys m B for each group. Keys are stored over the root of their size."""
    stored_MGD = params["memory/key"]
    key_MGD = np.broadcast_to(stored_MGD, (a.memory_slots, a.kv_heads, stored_MGD.shape[-1]))
    key_MGr = np.einsum("mgd,dgr->mgr", key_MGD, key_DGr) * np.sqrt(key_DGr.shape[0] / key_DGr.shape[-1])
    return {"memory/key": key_MGr, "memory/value": _values_of_groups(a, params)}


def _values_of_groups(a: Attending, params: Params) -> np.ndarray:
    """The values of the slots [M, G, V] for each group, which all heads may have shared."""
    stored_MGV = params["memory/value"]
    return np.broadcast_to(stored_MGV, (a.memory_slots, a.kv_heads, stored_MGV.shape[-1]))
