"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer or in none."""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.by_layer import everywhere
from xfresearch.interop.family import Key

FAMILY = replace(
    llama.FAMILY,
    name="mistral",
    architecture="MistralForCausalLM",
    keys=(
        *llama.KEYS,
        llama.kv_heads(8),
        Key("max_position_embeddings", "max_length", 131072),
        Key("hidden_act", "*.feed_forward.kind", "silu", llama.GATED),
    ),
    by_layer=everywhere(default=4096),
)
