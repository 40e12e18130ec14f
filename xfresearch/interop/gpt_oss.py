"""gpt-oss (OpenAI 2025): Mixtral with biases, clamped SwiGLU, a trained sink for each head, and sliding windows in every
other layer. Gates and multipliers of experts are interleaved in one tensor.

The folders that OpenAI published have experts in MXFP4, which is refused.
"""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.by_layer import every, some_layers
from xfresearch.interop.family import BIASES, Key, Rope, linear, row

MLP = "model.layers.{layer}.mlp"
MOE = "*.feed_forward.moe."
GATE_UP = ("feed_forward/experts/gate", "feed_forward/experts/up")
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip

FAMILY = replace(
    llama.FAMILY,
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    fixed=llama.FIXED
    | {"*.norm_cast": "after_gain", "*.attention.sink": "learned", "*.feed_forward.kind": "moe"}
    | {f"{MOE}expert": "swiglu_clamped", f"{MOE}bias": ("router", "experts")},
    keys=(
        *llama.KEYS,
        llama.kv_heads(8),
        Key("head_dim", "*.attention.head_size", 64),
        Key("max_position_embeddings", "max_length", 131_072),
        Key("rms_norm_eps", "*.norm_epsilon", 1e-5),
        Key("attention_bias", "*.attention.bias", True, BIASES),
        Key("num_local_experts", f"{MOE}experts", 128, alias="num_experts"),
        Key("num_experts_per_tok", f"{MOE}top_k", 4),
        Key("router_aux_loss_coef", f"{MOE}balance_loss", 0.001),
    ),
    needs={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    rows=(
        *llama.EMBEDDING,
        *llama.NORMS,
        *llama.ATTENTION,
        row("model.layers.{layer}.self_attn.sinks", "H", "attention/sink"),
        *linear(f"{MLP}.router", "feed_forward/router", "E D"),
        row(f"{MLP}.experts.gate_up_proj", "E D F2", *GATE_UP),
        row(f"{MLP}.experts.gate_up_proj_bias", "E F2", *(f"{path}_bias" for path in GATE_UP)),
        row(f"{MLP}.experts.down_proj", "E F D", "feed_forward/experts/down"),
        row(f"{MLP}.experts.down_proj_bias", "E D", "feed_forward/experts/down_bias"),
    ),
    rope=Rope(theta_default=150_000.0, scaling_default=YARN),
    without_effect=("hidden_act", "experts_per_token", "initial_context_length"),
    by_layer=some_layers(every(2), default=128),
)
