"""Qwen3 (Yang et al. 2025): Qwen2 with a per-head query-key norm, an independent head size, and no biases."""

from dataclasses import replace

from xfresearch.interop import llama, qwen2
from xfresearch.interop.family import BIASES, Key, row

QK_NORMS = (
    row("model.layers.{layer}.self_attn.q_norm.weight", "K", "attention/query_norm/gain"),
    row("model.layers.{layer}.self_attn.k_norm.weight", "K", "attention/key_norm/gain"),
)

FAMILY = replace(
    qwen2.FAMILY,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed=llama.FIXED | {"*.attention.qk_norm": "rms"},
    keys=(
        *qwen2.FAMILY.keys,
        Key("head_dim", "*.attention.head_size", 128),
        Key("attention_bias", "*.attention.bias", False, BIASES),
    ),
    rows=(*llama.FAMILY.rows, *QK_NORMS),
)
