"""Attention to persistent slots only, as a layer (Sukhbaatar et al. 2019)."""

import numpy as np

from tests.reference.attention import head_of, output, slots_of, wide_memory
from tests.reference.norms import softmax
from tests.reference.records import record
from tests.variants.case import MixerCase
from tests.variants.parameters import INPUT, MEAN, OUTPUT, SLOTS, biases


def slot_attention(p, x_LD, block, sequence):
    """Attention to slots only."""
    config = block.attention
    if config.memory_activation != "softmax":
        return wide_memory(p["memory"], config, x_LD) + p.get("output", {}).get("bias", 0)
    queries = [head_of(p.get("query"), config.query, x_LD, h, config.head_size) for h in range(config.heads)]
    q_LHK = record("query", np.stack(queries, 1))
    share = config.heads // config.kv_heads
    of_head = [slots_of(p["memory"], config, q_LHK[:, h], h // share) for h in range(config.heads)]
    m_HLM = record("coefficients", np.stack([softmax(logits) for logits, _ in of_head]))
    o = [m_LM @ values for m_LM, (_, values) in zip(m_HLM, of_head, strict=True)]
    return output(p, list(record("heads", np.stack(o, 1)).swapaxes(0, 1)))


CASES = [
    MixerCase(
        "slots",
        slot_attention,
        needs={"attention.memory_slots": 32},
        parameters={
            "block/attention/query/kernel": INPUT,
            "block/attention/output/kernel": OUTPUT,
            **biases("block/attention/query", "block/attention/output"),
            **SLOTS,
        },
        values={
            "attention.heads": "size",
            "attention.memory_slots": "size",
            "attention.kv_heads": [2],
            "attention.head_size": [6],
            "attention.scale": [0.2],
            "attention.softcap": [2.0],
            "attention.memory_activation": ["relu"],
            "attention.bias": [("query", "output")],
        },
        needs_of={"attention.query=identity_whole": {"attention.head_size": 32}},
        writes={"attention.kind=slots": MEAN},
    )
]
