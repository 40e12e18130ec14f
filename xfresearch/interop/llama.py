"""Llama 2 and 3 (Touvron et al. 2023b; Grattafiori et al. 2024): pre-norm RMSNorm, RoPE, SwiGLU, grouped queries."""

from xfresearch.interop.family import BIASES, Family, Key, Rope, linear, norm, row

GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}


def kv_heads(default: int) -> Key:
    """The key of the number of key-value heads; null means as many as query heads."""
    return Key("num_key_value_heads", "*.attention.kv_heads", default, null=0)


FIXED = {
    "final_norm": "rms",
    "*.norm": "rms",
    "*.norm_cast": "before_gain",
    "*.attention.position": "rope",
}

KEYS = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "width"),
    Key("num_hidden_layers", "depth"),
    Key("max_position_embeddings", "max_length", 2048),
    Key("tie_word_embeddings", "tie_embeddings", False),
    Key("num_attention_heads", "*.attention.heads"),
    kv_heads(0),
    Key("head_dim", "*.attention.head_size", 0),
    Key("intermediate_size", "*.feed_forward.hidden"),
    Key("rms_norm_eps", "*.norm_epsilon", 1e-6),
    Key("attention_dropout", "*.attention.dropout", 0.0),
)

EMBEDDING = (
    row("model.embed_tokens.weight", "V D", "embed/table"),
    row("lm_head.weight", "V D", "head/table"),
    *norm("model.norm", "final_norm"),
)

NORMS = (
    *norm("model.layers.{layer}.input_layernorm", "attention_norm_in"),
    *norm("model.layers.{layer}.post_attention_layernorm", "feed_forward_norm_in"),
)

ATTENTION = (
    *linear("model.layers.{layer}.self_attn.q_proj", "attention/query", "HK D"),
    *linear("model.layers.{layer}.self_attn.k_proj", "attention/key", "GK D"),
    *linear("model.layers.{layer}.self_attn.v_proj", "attention/value", "GK D"),
    *linear("model.layers.{layer}.self_attn.o_proj", "attention/output", "D HK"),
)

FEED_FORWARD = (
    *linear("model.layers.{layer}.mlp.gate_proj", "feed_forward/gate", "F D"),
    *linear("model.layers.{layer}.mlp.up_proj", "feed_forward/up", "F D"),
    *linear("model.layers.{layer}.mlp.down_proj", "feed_forward/down", "D F"),
)

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    fixed=FIXED,
    keys=(
        *KEYS,
        Key("hidden_act", "*.feed_forward.kind", "silu", GATED),
        Key("attention_bias", "*.attention.bias", False, BIASES),
        Key("mlp_bias", "*.feed_forward.bias", False),
    ),
    rows=(*EMBEDDING, *NORMS, *ATTENTION, *FEED_FORWARD),
    rope=Rope(),
    ignored=(r".*\.rotary_emb\.inv_freq",),
)
