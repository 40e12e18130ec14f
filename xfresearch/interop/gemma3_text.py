"""Gemma 3 (Gemma Team 2025), its text models: Gemma 2 with a query-key norm, without softcaps, and with sliding windows in
five of six layers, which have a RoPE with another base."""

from dataclasses import replace

from xfresearch.interop import gemma2
from xfresearch.interop.by_layer import every, some_layers_with_rope
from xfresearch.interop.family import Key, Rope
from xfresearch.interop.qwen3 import QK_NORMS

ROPE = Rope(theta_default=1e6, by_type=True, sliding_theta="rope_local_base_freq", sliding_theta_default=1e4)


def layer_types(config: dict) -> list[str]:
    """The layer types of a config.json without `layer_types`."""
    return every(config.get("sliding_window_pattern", 6))(config)


FAMILY = replace(
    gemma2.FAMILY,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fixed={**gemma2.FAMILY.fixed, "*.attention.qk_norm": "rms"},
    keys=(
        *(key for key in gemma2.FAMILY.keys if key.theirs != "attn_logit_softcapping"),
        Key("vocab_size", "vocab_size", 262_208),
        Key("max_position_embeddings", "max_length", 131_072),
        gemma2.softcap("final_logit_softcapping", "logit_softcap", 0.0),
    ),
    rows=(*gemma2.FAMILY.rows, *QK_NORMS),
    needs=gemma2.FAMILY.needs | {"attn_logit_softcapping": None},  # `transformers` does not read it
    without_effect=("hidden_act", "sliding_window_pattern"),  # the latter is read without `layer_types`
    rope=ROPE,
    by_layer=some_layers_with_rope(layer_types, default=4096, rope=ROPE),
)
