"""Gemma (Gemma Team 2024): Llama with GELU, norm gains stored minus 1, and a tied embedding scaled by sqrt(width).

Its first checkpoints have `hidden_act: gelu`, but were trained with the tanh approximation, so both names map to it.
"""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.family import BIASES, Key

TANH = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"}

FAMILY = replace(
    llama.FAMILY,
    name="gemma",
    architecture="GemmaForCausalLM",
    fixed=llama.FIXED | {"embedding_scale": "sqrt_width", "*.norm_offset": 1.0, "*.norm_cast": "after_gain"},
    keys=(
        *llama.KEYS,
        llama.kv_heads(16),
        Key("max_position_embeddings", "max_length", 8192),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("head_dim", "*.attention.head_size", 256),
        Key("hidden_act", "*.feed_forward.kind", "gelu_pytorch_tanh", TANH),
        Key("attention_bias", "*.attention.bias", False, BIASES),
    ),
    needs={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
)
