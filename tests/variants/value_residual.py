"""Value residual: each layer's values are mixed with those of the first. Zhou et al. 2024, eq. 5."""

from dataclasses import replace

from tests.reference.attention import queries_keys_values
from tests.variants.case import MixerCase, Parameter
from tests.variants.parameters import INPUT, OUTPUT, VALUE
from tests.variants.softmax import attention
from xfresearch.models.mixers.softmax.config import SoftmaxConfig


def value_residual(p, x_LD, block, sequence):
    """Zhou et al. 2024, eq. 5: v = a v_n + b v_1."""
    softmax = SoftmaxConfig(**{name: getattr(block.attention, name) for name in
                               ("heads", "kv_heads", "head_size", "position", "rope")})  # fmt: skip
    block = replace(block, attention=replace(softmax, output="identity") if "output" not in p else softmax)
    queries, keys, values = queries_keys_values(p, x_LD, block)
    values = list(values)
    first = sequence.shared.setdefault("first_values", values)
    values = [p["own"] * v + p["first"] * v_1 for v, v_1 in zip(values, first, strict=True)]
    return attention(p, x_LD, block, sequence, (queries, keys, values))


CASES = [
    MixerCase(
        "value_residual",
        value_residual,
        parameters={
            "block/attention/query/kernel": INPUT,
            "block/attention/key/kernel": INPUT,
            "block/attention/value/kernel": VALUE,
            "block/attention/output/kernel": OUTPUT,
            "block/attention/own": Parameter(0.5),
            "block/attention/first": Parameter(0.5),
        },
        values={"attention.heads": "size", "attention.kv_heads": [2], "attention.head_size": [6]},
    )
]
