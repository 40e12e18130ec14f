"""Cross-attention of the NumPy reference (Vaswani et al. 2017, sec. 3.2.3): queries of the decoder's stream, keys and values
of the encoder's output. Float64, written from the equation; one sequence and its source.
"""

from dataclasses import replace

import numpy as np

from tests.reference.attention import gated, head_of, norm_heads, output, scale, slots_of, wide_memory
from tests.reference.norms import softcap, softmax
from tests.reference.records import record


def cross_attention(p, x_LD, block, segments, source):
    """source: (s_SW, the number of the pair of each of its tokens)."""
    a = block.cross_attention
    block = replace(block, attention=a)  # whose norms are those of attention
    s_SW, pair_S = source
    clipped = lambda heads: [np.clip(x, -(a.clip or np.inf), a.clip or np.inf) for x in heads]  # noqa: E731
    q = [head_of(p.get("query"), a.query, x_LD, h, a.head_size) for h in range(a.heads)]
    raw = [head_of(p.get("key"), a.key, s_SW, g, a.head_size) for g in range(a.kv_heads)]
    v = raw if a.value == "key" else [head_of(p.get("value"), a.value, s_SW, g, a.head_size) for g in range(a.kv_heads)]
    q, k = (clipped(norm_heads(p.get(f"{name}_norm", {}), x, block)) for name, x in (("query", q), ("key", raw)))
    q_LHK, k_SGK, v_SGV = np.stack(q, 1), np.stack(k, 1), np.stack(clipped(v), 1)
    k_SGK = k_SGK[:, :1] if a.key == "identity_whole" else k_SGK
    v_SGV = v_SGV[:, :1] if "identity_whole" in (a.value, a.key if a.value == "key" else "") else v_SGV
    q_LHK, k_SGK, v_SGV = record("query", q_LHK), record("key", k_SGK), record("value", v_SGV)
    seen = np.asarray(segments)[:, None] == np.asarray(pair_S)[None]
    slots = p["memory"] if a.memory_slots and a.memory_activation == "softmax" else None
    w, beside, slot_values = [], [], []
    for h in range(a.heads):
        g = h // (a.heads // a.kv_heads)
        key = k_SGK[:, g if k_SGK.shape[1] > 1 else 0]
        scores = np.where(seen, softcap(q_LHK[:, h] @ key.T * scale(a, q_LHK.shape[-1]), a.softcap), -np.inf)
        if slots:
            to_slots, of_head = slots_of(slots, a, q_LHK[:, h], g)
            scores = np.concatenate([scores, to_slots], -1)
            slot_values.append(of_head)
        if a.sink != "none":
            scores = np.concatenate([scores, np.full((len(scores), 1), p["sink"][h] if a.sink == "learned" else 0.0)], -1)
        each = np.array([softmax(row) if np.isfinite(row).any() else 0 * row.clip(0) for row in scores])
        w.append(each[:, : len(s_SW)])
        beside.append(each[:, len(s_SW) :])
    w_HLS = record("weights", np.stack(w))
    o = [w_HLS[h] @ v_SGV[:, h // (a.heads // a.kv_heads) if v_SGV.shape[1] > 1 else 0] for h in range(a.heads)]
    if slots or a.sink != "none":
        m_HLM = record("coefficients" if slots or not a.memory_slots else "sink_weight", np.stack(beside))
        o = [each + m[:, : len(x)] @ x for each, m, x in zip(o, m_HLM, slot_values, strict=True)] if slots else o
    o = list(record("heads", np.stack(o, 1)).swapaxes(0, 1))
    y_LD = output(p, gated(p, o, x_LD) if a.output_gate != "none" else o)
    return y_LD + wide_memory(p["memory"], a, x_LD) if a.memory_slots and not slots else y_LD
