"""merge_query_key: the matrices of queries and keys become one matrix per head.

    (x W_Q + b_Q) (y W_K + b_K)^T = x W_Q W_K^T y^T + b_Q W_K^T y^T + (x W_Q + b_Q) b_K^T

x is the token that looks, y the one that is seen. The last term is the same for every y, so the softmax over the context
cancels it. Left are W_h = W_Q W_K^T of size D x D and the bias b_Q W_K^T. Heads of a group share W_K, and each gets its
own W_h. In cross-attention y is the output of the encoder, of its width W, and W_h = W_Q W_K^T of size D x W maps one
stack's stream to the other's: it is all that joins them in the logits.

A slot with key m has no W_K, and the last term is in its logit too if it is dropped from the others:

    (x W_Q + b_Q) (m - b_K)^T = (x W_Q + b_Q) W_K^T m'^T      m' = (m - b_K) (W_K^T W_K)^-1 W_K^T

which is exact if the columns of W_K are independent. The zero logit of a sink has no such m', and softcap is not linear:
both are refused if b_K is not 0.

RoPE rotates between the two matrices: x W_Q R(l - s) W_K^T y^T has a different matrix for every distance. A norm of
queries or keys divides by a length, clipping is not linear, and relative keys read the query alone.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.mixers.memory_slots import slot_heads, softmax_slots
from xfresearch.models.mixers.softmax.config import Attending
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.surgery.conversion import Conversion
from xfresearch.surgery.key_value_groups import group_of_heads, pseudo_inverses
from xfresearch.surgery.network import ATTENDING, Network, Params, Target
from xfresearch.surgery.refused import refuse_unless

TERMS = {
    "rope": "x W_Q R(l - s) W_K^T y^T: RoPE's rotation gives another matrix for every distance l - s",
    "relative_key": "x W_Q r_(l - s)^T: relative keys read the query without W_K",
}


def convert(network: Network, mixers: list[Target], broken: bool = False) -> Network:
    for each in mixers:
        _check(each.options, network.inside(each), each.where)
    return network.change_each(
        mixers,
        lambda each: _merged(each.options),
        lambda each, params: _merge(each, params, network.figures, broken),
    )


def _check(a, params: Params, where: str) -> None:
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
        new |= _slots(target, params, figures)
    return new


def _slots(target: Target[Attending], params: Params, figures: dict[str, float]) -> Params:
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
    slots = {"memory/key": key_MGD}
    if slot_heads(a) == 1:
        stored_MGV = params["memory/value"]
        slots["memory/value"] = np.broadcast_to(stored_MGV, (a.memory_slots, groups, stored_MGV.shape[-1]))
    return slots


MERGE_QUERY_KEY = Conversion(
    name="merge_query_key",
    about="W_Q W_K^T as one matrix per head",
    conditions="softmax attention without RoPE, relative keys, norms or clipping of queries and keys; no bias of the key "
    "under a sink or a softcap",
    broken="with the rows of each matrix in reverse order",
    convert=convert,
    roles=ATTENDING,
)
