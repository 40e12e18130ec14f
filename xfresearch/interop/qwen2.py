"""Qwen2 (Yang et al. 2024): Llama with biases on queries, keys and values, and optional windows in upper layers."""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.by_layer import some_layers
from xfresearch.interop.family import Key, count


def upper_layers(config: dict) -> list[str]:
    """The layer types of a config.json without `layer_types`."""
    first = count("max_window_layers", config.get("max_window_layers", 28))
    return ["full_attention" if i < first else "sliding_attention" for i in range(config["num_hidden_layers"])]


FAMILY = replace(
    llama.FAMILY,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed=llama.FIXED | {"*.attention.bias": ("query", "key", "value")},
    keys=(
        *llama.KEYS,
        llama.kv_heads(32),
        Key("max_position_embeddings", "max_length", 32768),
        Key("hidden_act", "*.feed_forward.kind", "silu", llama.GATED),
    ),
    by_layer=some_layers(upper_layers, default=4096, switched=True),
)
