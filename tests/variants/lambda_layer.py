"""Lambda layer. Bello 2021, sec. 3.1-3.2 (multi-query lambda layer; intra-depth in app. C). The context is limited to the
tokens up to n, the embeddings to the given distances. Queries and values are normed token by token."""

import numpy as np

from tests.reference.norms import norm_of, softmax
from tests.reference.records import record
from tests.variants.case import NORM, MixerCase, Parameter
from tests.variants.parameters import INPUT, fan, output_scale


def lambda_layer(p, x_LD, block, sequence):
    def project(name, i):
        y = x_LD @ p[name]["kernel"][:, i]
        scaling = {"query": "query_scaling", "lambda_value": "value_scaling"}.get(name)
        return norm_of(block.attention.lambdas.norm, p.get(scaling, {}), y, block) if scaling else y

    parts = {
        "query": block.attention.heads,
        "lambda_key": len(p["distances"][0]),
        "lambda_value": len(p["distances"][0]),
    }
    q, k, v = ([project(name, i) for i in range(n)] for name, n in parts.items())
    for name, heads in (("query", q), ("key", k), ("value", v)):
        record(name, np.stack(heads, 1))
    return mix_by_lambdas(q, k, v, p["distances"], sequence.segments)


def mix_by_lambdas(q, k, v, distances, segments):
    """y [L, H V]. Lists of q [L, K] per head, of k [L, K] and v [L, V] per depth; distances [R, U, K]."""
    L, depths = len(q[0]), range(len(k))
    factors = np.zeros((L, L, len(k), q[0].shape[1]))  # of the values, for each number of a query
    for n in range(L):
        seen = [m for m in range(n + 1) if segments[m] == segments[n]]
        for u in depths:
            factors[n, seen, u] = softmax(k[u][seen].T).T
            for m in (m for m in seen if n - m < len(distances)):
                factors[n, m, u] += distances[n - m, u]
    state_LKV = record("state", np.einsum("lsuk,usv->lkv", factors, np.stack(v)))
    record("weights", np.einsum("hlk,lsuk->hlsu", np.stack(q), factors))
    y_LHV = record("heads", np.einsum("hlk,lkv->lhv", np.stack(q), state_LKV))
    return y_LHV.reshape(L, -1)


def value_gain(shape, model, block) -> float:
    """There is no W_O: the normed values are what the layer writes."""
    return output_scale(model, block, "attention") - block.norm_offset


CASES = [
    MixerCase(
        "lambda",
        lambda_layer,
        parameters={
            "block/attention/query/kernel": INPUT,
            "block/attention/lambda_key/kernel": INPUT,
            "block/attention/lambda_value/kernel": INPUT,
            "block/attention/distances": Parameter(lambda shape, model, block: fan(np.prod(shape), model)),
            "block/attention/query_scaling": NORM,
            "block/attention/value_scaling": NORM,
            "block/attention/value_scaling/gain": Parameter(value_gain),
        },
        values={
            "attention.heads": "size",
            "attention.lambdas.key_size": [6],
            "attention.lambdas.window": [3, 0],
            "attention.lambdas.depth": [2],
            "attention.lambdas.chunk": [3],
            "attention.lambdas.norm": ["none"],
        },
        writes={
            "attention.kind=lambda": "values are normed to 1, and there is no W_O that scales the output by 1/sqrt(2 depth)"
        },
    )
]
