"""OLMo (Groeneveld et al. 2024): Llama with LayerNorm without gain and bias, and clipped queries, keys and values."""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.family import BIASES, Key

CLIP = Key("clip_qkv", "*.attention.clip", 0.0, write=lambda clip: clip or None)

FAMILY = replace(
    llama.FAMILY,
    name="olmo",
    architecture="OlmoForCausalLM",
    fixed={
        "final_norm": "layer",
        "*.norm": "layer",
        "*.norm_gain": False,
        "*.norm_epsilon": 1e-5,
        "*.attention.position": "rope",
    },
    keys=(
        *(key for key in llama.KEYS if key.theirs != "rms_norm_eps"),
        Key("hidden_act", "*.feed_forward.kind", "silu", llama.GATED),
        Key("attention_bias", "*.attention.bias", False, BIASES),
        CLIP,
    ),
)
