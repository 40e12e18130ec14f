"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023; Li et al. 2023): GPT-J's blocks with biases everywhere, also on the
logits, and half-split RoPE on a fraction of each head."""

from xfresearch.interop.family import Family, Key, Rope, linear, norm, row
from xfresearch.interop.gpt2 import PLAIN
from xfresearch.models.mixers.softmax.options import PROJECTIONS

LAYER = "model.layers.{layer}"

FAMILY = Family(
    name="phi",
    architecture="PhiForCausalLM",
    fixed={
        "final_norm": "layer",
        "head_bias": True,
        "*.layout": "parallel",
        "*.norm": "layer",
        "*.norm_bias": True,
        "*.attention.position": "rope",
        "*.attention.bias": PROJECTIONS,
        "*.feed_forward.bias": True,
    },
    keys=(
        Key("vocab_size", "vocab_size", 51200),
        Key("hidden_size", "width", 2048),
        Key("num_hidden_layers", "depth", 24),
        Key("max_position_embeddings", "max_length", 2048),
        Key("tie_word_embeddings", "tie_embeddings", False),
        Key("num_attention_heads", "*.attention.heads", 32),
        Key("num_key_value_heads", "*.attention.kv_heads", 0),
        Key("qk_layernorm", "*.attention.qk_norm", False, {False: "none", True: "layer"}),
        Key("intermediate_size", "*.feed_forward.hidden", 8192),
        Key("hidden_act", "*.feed_forward.kind", "gelu_new", PLAIN),
        Key("layer_norm_eps", "*.norm_epsilon", 1e-5),
        Key("embd_pdrop", "dropout", 0.0),
        Key("resid_pdrop", "*.dropout", 0.0),
        Key("attention_dropout", "*.attention.dropout", 0.0),
    ),
    rows=(
        row("model.embed_tokens.weight", "V D", "embed/table"),
        row("lm_head.weight", "V D", "head/table"),
        row("lm_head.bias", "V", "head_bias/bias"),
        *norm("model.final_layernorm", "final_norm"),
        *norm(f"{LAYER}.input_layernorm", "attention_norm_in"),
        *linear(f"{LAYER}.self_attn.q_proj", "attention/query", "HK D"),
        *linear(f"{LAYER}.self_attn.k_proj", "attention/key", "GK D"),
        *linear(f"{LAYER}.self_attn.v_proj", "attention/value", "GK D"),
        *linear(f"{LAYER}.self_attn.dense", "attention/output", "D HK"),
        *norm(f"{LAYER}.self_attn.q_layernorm", "attention/query_norm", "K"),
        *norm(f"{LAYER}.self_attn.k_layernorm", "attention/key_norm", "K"),
        *linear(f"{LAYER}.mlp.fc1", "feed_forward/up", "F D"),
        *linear(f"{LAYER}.mlp.fc2", "feed_forward/down", "D F"),
    ),
    rope=Rope(fraction="partial_rotary_factor", default=0.5),
    ignored=(r".*\.rotary_emb\.inv_freq",),
)
