"""Differential attention. Ye et al. 2024, eq. 1-3. In their code, all heads share the RMSNorm of a head."""

import math

import numpy as np

from tests.reference.attention import output, positioned
from tests.reference.norms import softmax
from tests.reference.records import record
from tests.variants.case import MixerCase, Parameter
from tests.variants.parameters import INPUT, OUTPUT, VALUE
from xfresearch.models.mixers.softmax.options import RopeConfig


def differential(p, x_LD, block, sequence):
    a = block.attention
    L = len(x_LD)
    H = a.heads
    G = a.kv_heads
    K = a.head_size
    segments, causal = sequence.segments, sequence.causal
    prefix = sequence.shared.get("prefix", np.zeros(L))
    allowed = np.array([[segments[s] == segments[t] and (not causal or prefix[s] or 0 <= t - s < (a.window or 10**9))
                         for s in range(L)] for t in range(L)])  # fmt: skip
    first = 0.8 - 0.6 * math.exp(-0.3 * sequence.layer)  # layers count from 1 in the paper
    terms = [math.exp(p[f"lambda_query_{i}"] @ p[f"lambda_key_{i}"]) for i in (1, 2)]
    weight = terms[0] - terms[1] + first
    # The 2 H queries are ordered by (key-value head, map, head of its group), the 2 G keys by (head, map).
    parts = [[x_LD @ kernel for kernel in p[name]["kernel"].swapaxes(0, 1)] for name in ("query", "key", "value")]
    _, q, k, v = positioned(*parts, sequence.positions, a)
    scores = [np.where(allowed, q[:, n] @ k[:, n // (H // G)].T / math.sqrt(K), -np.inf) for n in range(2 * H)]
    w = record("weights", np.stack([[softmax(row) for row in each] for each in scores]))
    heads = []
    for h in range(H):
        g, r = divmod(h, H // G)
        maps = [w[(2 * g + i) * (H // G) + r] for i in (0, 1)]
        o = (maps[0] - weight * maps[1]) @ v[:, g]
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + block.norm_epsilon) * p["head_norm"]["gain"]
        heads.append((1 - first) * o)
    return output(p, list(record("heads", np.stack(heads, 1)).swapaxes(0, 1)))


HEADS_OF_8 = {"attention.heads": 2}  # in which scaling changes some of RoPE's frequencies
CASES = [
    MixerCase(
        "differential",
        differential,
        parameters={
            "block/attention/query/kernel": INPUT,
            "block/attention/key/kernel": INPUT,
            "block/attention/value/kernel": VALUE,
            "block/attention/output/kernel": OUTPUT,
            "block/attention/head_norm/gain": Parameter(1.0),
            **{f"block/attention/lambda_{part}_{i}": Parameter(0.1) for part in ("query", "key") for i in (1, 2)},
        },
        values={
            "attention.heads": "size",
            "attention.kv_heads": [2],
            "attention.head_size": [6],
            "attention.window": [3],
        },
        needs_of={f"attention.rope.{name}": HEADS_OF_8 for name in RopeConfig.__annotations__},
    )
]
