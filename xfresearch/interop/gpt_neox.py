"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): parallel attention and feed-forward with a LayerNorm
each, RoPE on a quarter of each head, and one QKV matrix in which each head's query, key and value are adjacent."""

from xfresearch.interop.family import BIASES, Family, Key, Rope, linear, norm, row
from xfresearch.interop.gpt2 import PLAIN, QKV

LAYER = "gpt_neox.layers.{layer}"

FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    fixed={
        "final_norm": "layer",
        "*.norm": "layer",
        "*.norm_bias": True,
        "*.attention.position": "rope",
        "*.feed_forward.bias": True,
    },
    keys=(
        Key("vocab_size", "vocab_size", 50432),
        Key("hidden_size", "width", 6144),
        Key("num_hidden_layers", "depth", 44),
        Key("max_position_embeddings", "max_length", 2048),
        Key("tie_word_embeddings", "tie_embeddings", False),
        Key("use_parallel_residual", "*.layout", True, {True: "parallel_two_norms", False: "pre_norm"}),
        Key("num_attention_heads", "*.attention.heads", 64),
        Key("attention_bias", "*.attention.bias", True, BIASES),
        Key("intermediate_size", "*.feed_forward.hidden", 24576),
        Key("hidden_act", "*.feed_forward.kind", "gelu", PLAIN),
        Key("layer_norm_eps", "*.norm_epsilon", 1e-5),
        Key("hidden_dropout", "*.dropout", 0.0),
        Key("attention_dropout", "*.attention.dropout", 0.0),
    ),
    rows=(
        row("gpt_neox.embed_in.weight", "V D", "embed/table"),
        row("embed_out.weight", "V D", "head/table"),
        *norm("gpt_neox.final_layer_norm", "final_norm"),
        *norm(f"{LAYER}.input_layernorm", "attention_norm_in"),
        *norm(f"{LAYER}.post_attention_layernorm", "feed_forward_norm_in"),
        row(f"{LAYER}.attention.query_key_value.weight", "H3K D", *(f"{name}/kernel" for name in QKV)),
        row(f"{LAYER}.attention.query_key_value.bias", "H3K", *(f"{name}/bias" for name in QKV)),
        *linear(f"{LAYER}.attention.dense", "attention/output", "D HK"),
        *linear(f"{LAYER}.mlp.dense_h_to_4h", "feed_forward/up", "F D"),
        *linear(f"{LAYER}.mlp.dense_4h_to_h", "feed_forward/down", "D F"),
    ),
    rope=Rope(fraction="rotary_pct", default=0.25, theta="rotary_emb_base"),
    ignored=(r".*\.attention\.(masked_)?bias", r".*\.rotary_emb\.inv_freq"),
)
