"""OLMo 2 (OLMo et al. 2024): Llama with RMSNorm on each sublayer's output, and on queries and keys over all heads."""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.family import BIASES, Key, norm, row

QK_NORMS = (
    row("model.layers.{layer}.self_attn.q_norm.weight", "HK", "attention/query_norm/gain"),
    row("model.layers.{layer}.self_attn.k_norm.weight", "GK", "attention/key_norm/gain"),
)
QK_NORM = {"*.attention.qk_norm": "rms", "*.attention.qk_norm_over": "heads"}

FAMILY = replace(
    llama.FAMILY,
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    fixed=llama.FIXED | QK_NORM | {"*.layout": "output_norm", "*.norm_cast": "after_gain"},
    keys=(
        *llama.KEYS,
        Key("rms_norm_eps", "*.norm_epsilon", 1e-5),
        Key("hidden_act", "*.feed_forward.kind", "silu", llama.GATED),
        Key("attention_bias", "*.attention.bias", False, BIASES),
    ),
    rows=(
        *llama.EMBEDDING,
        *norm("model.layers.{layer}.post_attention_layernorm", "attention_norm_out"),
        *norm("model.layers.{layer}.post_feedforward_layernorm", "feed_forward_norm_out"),
        *llama.ATTENTION,
        *QK_NORMS,
        *llama.FEED_FORWARD,
    ),
)
