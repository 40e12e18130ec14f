"""Gemma (Gemma Team 2024): Llama with GELU, gains stored less 1, and an embedding times sqrt(width), tied to the head.

Its first checkpoints say `hidden_act: gelu` and mean the approximation by tanh, in which they were trained.
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
        Key("max_position_embeddings", "max_length", 8192),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("head_dim", "*.attention.head_size", 256),
        Key("hidden_act", "*.feed_forward.kind", "gelu_pytorch_tanh", TANH),
        Key("attention_bias", "*.attention.bias", False, BIASES),
    ),
    needs={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
)
