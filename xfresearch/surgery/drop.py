"""drop_query, drop_key, drop_value and drop_output: matrices of attention that disappear without skips (Graef 2024).

    drop_query    x' = x W_Q + b_Q      query = x'      every other W that reads x: W_Q^-1 W
    drop_key      x' = x W_K + b_K      key = x'        every other W that reads x: W_K^-1 W
    drop_value    x' = x W_V + b_V      value = x'      every other W that reads x: W_V^-1 W

The query of a head is then its slice of x'. It equals x W_Q + b_Q, so RoPE and norms of queries see no change. W_K and W_V
are square only if every head has a key and a value of its own. With value='key' the values are x' too. basis.py has the
algebra, and the terms that are in the way elsewhere.

    drop_output   (o W_O + b_O) W_1 + b_1 = o (W_O W_1) + (b_O W_1 + b_1)

is `fuse_output` in a layout that keeps the place of W_O ('no_skip'): output='identity' needs as many numbers in the heads as
in the model. Every norm and every skip between W_O and W_1 is in the way; fuse_output.py lists them.

The layouts with cross-attention have skips, but `drop_query` needs no inverse there: W_Q moves into W_K.

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
from xfresearch.surgery.basis import drop
from xfresearch.surgery.fuse_output import between, check, fused
from xfresearch.surgery.key_value_groups import group_of_heads
from xfresearch.surgery.network import ATTENDING, Network, Params, Target
from xfresearch.surgery.refused import Refused, refuse_unless
from xfresearch.surgery.registry import Function, conversion

ELSEWHERE = {
    "key": "W_K reads the encoder's output, whose basis all layers share: merge_query_key makes W_Q W_K^T",
    "value": "W_V reads the encoder's output, whose basis all layers share: absorb_value_output makes W_V W_O",
}


def _drop(name: str, across: str) -> Function:
    """The conversion that drops the matrix of queries, keys or values. `across`: when it is exact in cross-attention."""
    symbol = f"W_{name[0].upper()}"

    @conversion(
        f"{symbol} into what writes a skipless layer's input, and its inverse into what else reads it",
        conditions="layouts without skips ('no_skip', 'skipless_parallel'), no norm at attention_in, a square and "
        f"well-conditioned {symbol} without a bias in layer 0, and other matrices on everything that reads and writes x; in "
        f"cross-attention {across}",
        broken=f"with the transpose of {symbol} for its inverse",
        roles=ATTENDING,
        name=f"drop_{name}",
    )
    def dropped(network: Network, sublayers: list[Target], broken: bool = False) -> Network:
        cross = [each for each in sublayers if each.role == "cross"]
        layers = [each.number for each in sublayers if each.role != "cross"]
        try:
            network = drop(network, layers, name, broken) if layers else network
        except Refused as refused:
            alone = " (role='cross' is for cross-attention alone)" if cross and name == "query" else ""
            raise Refused(f"{refused}{alone}") from refused
        return _without_matrix(network, network.again(cross), name, broken)

    return dropped


drop_query = _drop("query", "W_Q moves into W_K, if the query has no bias, norm or clipping")
drop_key = _drop("key", "merge_query_key")
drop_value = _drop("value", "absorb_value_output")


@conversion(
    "W_O into W_1 of a layer without a skip or a norm between them",
    conditions="nothing between W_O and W_1, and as many numbers in the heads as in the model",
    broken="with the rows of W_O in reverse order",
    roles=ATTENDING,
)
def drop_output(network: Network, sublayers: list[Target], broken: bool = False) -> Network:
    for each in sublayers:
        if each.role == "cross":
            raise Refused(f"{each.where}: {between(network.layers[each.number].block, 'cross')}")
        check(network, each.number)
        mixer, where = network.only("mixer", each.number), f"layer {each.number}"
        kind = mixer.options.kind
        refuse_unless(hasattr(mixer.options, "output"), f"{where}: a mixer of kind {kind!r} always has W_O in this layout")
        heads, size, width = network.inside(mixer)["output/kernel"].shape
        refuse_unless(heads * size == width, f"{where}: o has {heads} * {size} numbers, and the model has {width}")
    return fused(network, [each.number for each in sublayers], broken, replace)


def _without_matrix(network: Network, targets: list[Target], name: str, broken: bool) -> Network:
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
