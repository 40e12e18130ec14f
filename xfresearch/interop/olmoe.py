"""OLMoE (Muennighoff et al. 2024): Llama with a mixture of experts, whose gates are not renormalized, and OLMo 2's
query-key norm.

It has no `head_dim`: the head size is the width over the number of heads.
"""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.family import BIASES, Key, row
from xfresearch.interop.olmo import CLIP
from xfresearch.interop.olmo2 import QK_NORM, QK_NORMS

EXPERT = "model.layers.{layer}.mlp.experts.{expert}"

FAMILY = replace(
    llama.FAMILY,
    name="olmoe",
    architecture="OlmoeForCausalLM",
    fixed=llama.FIXED | QK_NORM | {"*.feed_forward.kind": "moe"},
    keys=(
        *(key for key in llama.KEYS if key.theirs != "head_dim"),
        Key("max_position_embeddings", "max_length", 4096),
        Key("rms_norm_eps", "*.norm_epsilon", 1e-5),
        Key("hidden_act", "*.feed_forward.moe.expert", "silu", llama.GATED),
        Key("attention_bias", "*.attention.bias", False, BIASES),
        Key("num_experts", "*.feed_forward.moe.experts", 64, alias="num_local_experts"),
        Key("num_experts_per_tok", "*.feed_forward.moe.top_k", 8),
        Key("norm_topk_prob", "*.feed_forward.moe.renormalise", False),
        Key("router_aux_loss_coef", "*.feed_forward.moe.balance_loss", 0.01),
        CLIP,
    ),
    rows=(
        *llama.EMBEDDING,
        *llama.NORMS,
        *llama.ATTENTION,
        *QK_NORMS,
        row("model.layers.{layer}.mlp.gate.weight", "E D", "feed_forward/router/kernel"),
        row(f"{EXPERT}.gate_proj.weight", "F D", "feed_forward/experts/gate"),
        row(f"{EXPERT}.up_proj.weight", "F D", "feed_forward/experts/up"),
        row(f"{EXPERT}.down_proj.weight", "D F", "feed_forward/experts/down"),
    ),
)
