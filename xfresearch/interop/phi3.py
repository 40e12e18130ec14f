"""Phi-3 (Abdin et al. 2024): Llama with one QKV matrix and one matrix of gates and multipliers. longrope, the scaling of its
variants for 128k tokens, is not supported."""

from dataclasses import replace

from xfresearch.interop import llama
from xfresearch.interop.by_layer import everywhere
from xfresearch.interop.family import Key, Rope, row

QKV = tuple(f"attention/{name}/kernel" for name in ("query", "key", "value"))

FAMILY = replace(
    llama.FAMILY,
    name="phi3",
    architecture="Phi3ForCausalLM",
    keys=(
        *(key for key in llama.KEYS if key.theirs != "head_dim"),
        Key("max_position_embeddings", "max_length", 4096),
        Key("rms_norm_eps", "*.norm_epsilon", 1e-5),
        Key("hidden_act", "*.feed_forward.kind", "silu", llama.GATED),
        Key("resid_pdrop", "*.dropout", 0.0),
    ),
    rows=(
        *llama.EMBEDDING,
        *llama.NORMS,
        row("model.layers.{layer}.self_attn.qkv_proj.weight", "HK|GK|GK D", *QKV),
        row("model.layers.{layer}.self_attn.o_proj.weight", "D HK", "attention/output/kernel"),
        row("model.layers.{layer}.mlp.gate_up_proj.weight", "2F D", "feed_forward/gate/kernel", "feed_forward/up/kernel"),
        row("model.layers.{layer}.mlp.down_proj.weight", "D F", "feed_forward/down/kernel"),
    ),
    without_effect=("embd_pdrop",),
    rope=Rope(fraction="partial_rotary_factor", scalings=("default",)),
    by_layer=everywhere(),
)
