"""Attention. Vaswani et al. 2017, eq. 1; query head h reads key-value head h // (H / G) (Ainslie et al. 2023). Shaped
attention: He & Hofmann 2023, eq. 5, aI + bA - cC. tests/reference/attention.py has the steps that other mixers share."""

import numpy as np

from tests.reference.attention import (
    gated,
    logit_bias,
    output,
    positioned,
    queries_keys_values,
    scale,
    slots_of,
    wide_memory,
)
from tests.reference.norms import softcap, softmax
from tests.reference.records import record
from tests.variants.case import NORM, MixerCase, Parameter
from tests.variants.parameters import MEAN, OUTPUT, SLOTS, biases, fan, inputs, values


def attention(p, x_LD, block, sequence, projected=None):
    """`projected`: queries, keys and values, if they are not those of `block`."""
    config = block.attention
    L = len(x_LD)
    segments, causal = sequence.segments, sequence.causal
    H = config.heads
    G = config.kv_heads
    reach = config.window or 10**9
    nearest = int(not config.sees_itself)
    prefix = sequence.shared.get("prefix", np.zeros(L))  # Raffel et al. 2020, fig. 3
    allowed = np.array([[segments[s] == segments[t] and (not causal or prefix[s] or nearest <= t - s < nearest + reach)
                         for s in range(L)] for t in range(L)])  # fmt: skip
    slots = p["memory"] if config.memory_slots and config.memory_activation == "softmax" else None
    projected = projected or queries_keys_values(p, x_LD, block)
    bare, queries, keys, values = positioned(*projected, sequence.positions, config)
    w, beside, slot_values = [], [], []
    for h in range(H):
        g = h // (H // G)
        q, k = queries[:, h], keys[:, g if keys.shape[1] > 1 else 0]
        bias = np.array([[logit_bias(p, sequence, config, q[t], h, t, s) if allowed[t, s] else 0
                          for s in range(L)] for t in range(L)])  # fmt: skip
        scores = np.where(allowed, softcap(q @ k.T * scale(config, q.shape[1]), config.softcap) + bias, -np.inf)
        if slots:
            to_slots, of_head = slots_of(slots, config, bare[:, h], g)  # without RoPE
            scores = np.concatenate([scores, to_slots], -1)
            slot_values.append(of_head)
        if config.sink != "none":  # gpt-oss 2025: e^s / (e^b + sum e^s); Miller 2023: b = 0
            sink = np.full((L, 1), p["sink"][h] if config.sink == "learned" else 0.0)
            scores = np.concatenate([scores, sink], -1)
        each = np.array([softmax(row) if np.isfinite(row).any() else 0 * row.clip(0) for row in scores])
        if config.shaping != "none":
            a, b, c = (p["shaping"].get(n, np.zeros(H))[h] for n in ("identity", "weights", "uniform"))
            each = a * np.eye(L) + b * each - c * allowed / np.maximum(allowed.sum(-1, keepdims=True), 1)
        w.append(each[:, :L])
        beside.append(each[:, L:])
    w_HLS = record("weights", np.stack(w))
    o = [w_HLS[h] @ values[:, h // (H // G) if values.shape[1] > 1 else 0] for h in range(H)]
    if slots or config.sink != "none":
        name = "coefficients" if slots or not config.memory_slots else "sink_weight"
        m_HLM = record(name, np.stack(beside))
        o = [each + m[:, : len(v)] @ v for each, m, v in zip(o, m_HLM, slot_values, strict=True)] if slots else o
    o = list(record("heads", np.stack(o, 1)).swapaxes(0, 1))
    o = gated(p, o, x_LD) if config.output_gate != "none" else o
    y_LD = output(p, o)
    return y_LD + wide_memory(p["memory"], config, x_LD) if config.memory_slots and not slots else y_LD


def low_rank(a) -> float:
    """Logits of rank r, divided by sqrt(K), are as large as those of rank K: r s^4 = K."""
    return (a.head_size / a.rank) ** 0.25 if a.rank else 1.0


def query(shape, model, block) -> float:
    a = block.attention
    if a.shaping == "shaped":  # uniform attention weights at first (He & Hofmann 2023)
        return 0.0
    if a.query == "merged" and not a.rank:  # like W_Q W_K^T: sums of K products
        return a.head_size**0.5 * fan(shape[0], model) ** 2
    return low_rank(a) * fan(shape[0], model)


def key(shape, model, block) -> float:
    return low_rank(block.attention) * fan(shape[0], model)


def value(shape, model, block) -> float:
    return 0.0 if block.attention.value == "identity_plus" else values(shape, model, block)


ROPE = {"attention.position": "rope"}
YARN = ROPE | {"attention.rope.scaling": "yarn", "attention.rope.original_length": 64}
WITH_SLOTS = {"attention.memory_slots": 32}
CASES = [
    MixerCase(
        "softmax",
        attention,
        parameters={
            "block/attention/query/kernel": Parameter(query, "bioo"),
            "block/attention/key/kernel": Parameter(key, "bioo"),
            "block/attention/value/kernel": Parameter(value, "bioo"),
            "block/attention/output/kernel": OUTPUT,
            "block/attention/gate/kernel": Parameter(inputs, "bioo bio"),
            **biases(*(f"block/attention/{name}" for name in ("query", "key", "value", "output"))),
            **{f"block/attention/{name}_norm": NORM for name in ("query", "key")},
            **SLOTS,
            "block/attention/value/identity_gain": Parameter(1.0),
            "block/attention/value/weight_gain": Parameter(1.0),
            "block/attention/shaping/identity": Parameter(1.0),
            "block/attention/shaping/weights": Parameter(
                lambda shape, model, block: block.attention.shaping == "shaped"
            ),
            "block/attention/shaping/uniform": Parameter(1.0),
            "block/attention/span/fraction": Parameter(0.0),
            "block/attention/sink": Parameter(0.0),
            "shared/relative_key": Parameter(1.0),  # N(0, 1), as in the code of Sukhbaatar et al. 2019
            "shared/relative_bias": Parameter(0.0),
        },
        values={
            "attention.heads": "size",
            "attention.kv_heads": [1, 2],
            "attention.head_size": [6],
            "attention.rank": [6],
            "attention.scale": [0.2],
            "attention.window": [3],
            "attention.clip": [0.8],
            "attention.softcap": [1.0, 2.0],
            "attention.memory_slots": [32],
            "attention.rope.fraction": [0.5],
            "attention.qk_norm": ["rms", "layer"],
            "attention.memory_activation": ["relu", "gelu"],
            "attention.bias": [("query", "key", "value", "output"), ("output",)],
        },
        needs_of={
            "attention.memory_activation": WITH_SLOTS,
            "attention.memory_heads=shared": WITH_SLOTS,
            "attention.query=identity_whole": {"attention.head_size": 32},
            "attention.key=identity_whole": {"attention.head_size": 32},
            "attention.qk_norm_over=heads": {"attention.qk_norm": "rms", "attention.kv_heads": 2},
            "attention.clip": ROPE | {"attention.qk_norm": "rms"},
            "attention.softcap=1.0": WITH_SLOTS | {"attention.position": "t5"},
            "attention.rank": {"attention.query": "merged"},
            "attention.rope.fraction": ROPE,
            "attention.rope.scaling=linear": ROPE,
            "attention.rope.scaling=llama3": ROPE | {"attention.rope.original_length": 64},
            "attention.rope.scaling=yarn": ROPE | {"attention.rope.original_length": 64},
            "attention.rope.truncate=False": YARN,
            "attention.sees_itself=False": WITH_SLOTS | {"attention.position": "relative_key"},
            "attention.span=adaptive": {"attention.window": 6, "attention.span_ramp": 4},
        },
        writes={
            "attention.memory_slots": MEAN,
            "attention.shaping": "weights start at the identity: the output is the values, not a mean of them",
        },
    )
]
