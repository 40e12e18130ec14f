"""drop_query in cross-attention: W_Q moves into W_K, with or without skips.

    (x W_Q)(s W_K + b_K)^T = x (s W_K W_Q^T + b_K W_Q^T)^T

The query of every head is x itself then (query='identity_whole'), and the key has the decoder's width D. No inverse is
needed, since W_K does not read x: it maps the encoder's stream to the decoder's. A key for each head [W, H, D] is larger
than W_Q and W_K with several heads; with one head W_Q is saved. A slot's key m becomes m W_Q^T.

b_Q (s W_K)^T depends on the token of the source and has no place: merge_query_key keeps it as the bias of W_Q W_K^T. The
other matrices of cross-attention go where other conversions put them.
"""

from dataclasses import replace

import numpy as np

from xfresearch.models.mixers.memory_slots import softmax_slots
from xfresearch.models.mixers.softmax.cross import CrossConfig
from xfresearch.models.mixers.softmax.projections import logit_scale
from xfresearch.surgery.key_value_groups import group_of_heads
from xfresearch.surgery.network import Network, Params, Target
from xfresearch.surgery.refused import refuse_unless

ELSEWHERE = {
    "key": "W_K reads the encoder's output, whose basis all layers share: merge_query_key makes W_Q W_K^T",
    "value": "W_V reads the encoder's output, whose basis all layers share: absorb_value_output makes W_V W_O",
}


def without_matrix(network: Network, targets: list[Target], name: str, broken: bool) -> Network:
    """The network without the matrix `name` of these sublayers with cross-attention."""
    for each in targets:
        refuse_unless(name not in ELSEWHERE, f"{each.where}: {ELSEWHERE.get(name)}")
        _check(each.options, network.inside(each), each.where)
    return network.change_each(
        targets, lambda each: _without(each.options), lambda each, params: _moved(each, params, broken)
    )


def _check(a: CrossConfig, params: Params, where: str) -> None:
    learned = (a.query, a.key) == ("learned", "learned")
    refuse_unless(learned, f"{where}: query={a.query!r} and key={a.key!r} are not both matrices")
    refuse_unless(a.qk_norm == "none", f"{where}: the norm of queries and keys divides x W_Q by its length")
    refuse_unless(not a.clip, f"{where}: clip is not linear in x W_Q")
    biased = params.get("query/bias", np.zeros(1)).any()
    refuse_unless(not biased, f"{where}: b_Q (s W_K)^T depends on s and has no place (merge_query_key has one)")


def _without(a: CrossConfig) -> CrossConfig:
    bias = [name for name in a.bias if name != "query"]
    bias += ["value"] if a.value == "key" and "key" in a.bias else []
    value = "learned" if a.value == "key" else a.value
    heads = "each" if softmax_slots(a) else a.memory_heads
    new = replace(a, query="identity_whole", value=value, kv_heads=a.heads, bias=tuple(bias))
    return replace(new, memory_heads=heads)


def _moved(target: Target[CrossConfig], params: Params, broken: bool) -> Params:
    """The parameters with W_K W_Q^T for each head. Values and slots of a key-value head are repeated for each of its
    heads."""
    a, widths = target.options, (target.width, target.read_width)
    change = logit_scale(a, *widths) / logit_scale(_without(a), *widths)
    query_DHK = change * params["query/kernel"][::-1 if broken else 1]
    groups = group_of_heads(a)
    new = {path: value for path, value in params.items() if path.split("/")[0] not in ("query", "key")}
    for part, letters in (("kernel", "whk,dhk->whd"), ("bias", "hk,dhk->hd")):
        if f"key/{part}" in params:
            each = np.take(params[f"key/{part}"], groups, -2)
            new[f"key/{part}"] = np.einsum(letters, each, query_DHK)
        if f"value/{part}" in params or a.value == "key" and f"key/{part}" in params:
            new[f"value/{part}"] = np.take(params[f"{'key' if a.value == 'key' else 'value'}/{part}"], groups, -2)
    if softmax_slots(a):
        # Slots are stored over the root of the size of their keys, K before and D after.
        root = np.sqrt(params["memory/key"].shape[-1] / target.width)
        key_MHK, new["memory/value"] = (_of_heads(a, params[f"memory/{part}"]) for part in ("key", "value"))
        new["memory/key"] = root * np.einsum("mhk,dhk->mhd", key_MHK, query_DHK)
    return new


def _of_heads(a: CrossConfig, array_MGK: np.ndarray) -> np.ndarray:
    """The slots that each head reads, [M, H, K]."""
    every_MGK = np.broadcast_to(array_MGK, (len(array_MGK), a.kv_heads, array_MGK.shape[-1]))
    return every_MGK[:, group_of_heads(a)]
