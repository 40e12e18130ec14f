"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts; the gates are a softmax over the chosen experts."""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.by_layer import everywhere
from xfresearch.interop.family import Key, Rope, row

EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}"

FAMILY = replace(
    llama.FAMILY,
    name="mixtral",
    architecture="MixtralForCausalLM",
    fixed=llama.FIXED | {"*.feed_forward.kind": "moe"},
    keys=(
        *llama.KEYS,
        llama.kv_heads(8),
        Key("max_position_embeddings", "max_length", 131072),
        Key("rms_norm_eps", "*.norm_epsilon", 1e-5),
        Key("hidden_act", "*.feed_forward.moe.expert", "silu", llama.GATED),
        Key("num_local_experts", "*.feed_forward.moe.experts", 8, alias="num_experts"),
        Key("num_experts_per_tok", "*.feed_forward.moe.top_k", 2),
        Key("router_aux_loss_coef", "*.feed_forward.moe.balance_loss", 0.001),
        Key("router_jitter_noise", "*.feed_forward.moe.jitter", 0.0),
    ),
    rows=(
        *llama.EMBEDDING,
        *llama.NORMS,
        *llama.ATTENTION,
        row("model.layers.{layer}.block_sparse_moe.gate.weight", "E D", "feed_forward/router/kernel"),
        row(f"{EXPERT}.w1.weight", "F D", "feed_forward/experts/gate"),
        row(f"{EXPERT}.w2.weight", "D F", "feed_forward/experts/down"),
        row(f"{EXPERT}.w3.weight", "F D", "feed_forward/experts/up"),
    ),
    rope=Rope(theta_default=1e6),
    by_layer=everywhere(),
)
