"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer or in none."""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.family import Key
from xfresearch.interop.windows import everywhere

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
    windows=everywhere(default=4096),
)
