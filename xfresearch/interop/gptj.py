"""GPT-J (Wang & Komatsuzaki 2021): parallel attention and feed-forward with one LayerNorm, no biases in attention, a
bias on the logits, and interleaved RoPE, which rotates adjacent dimensions of a head."""

from xfresearch.interop.family import Family, Key, Rope, linear, norm, row
from xfresearch.interop.gpt2 import PLAIN

LAYER = "transformer.h.{layer}"

FAMILY = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    fixed={
        "final_norm": "layer",
        "head_bias": True,
        "*.layout": "parallel",
        "*.norm": "layer",
        "*.norm_bias": True,
        "*.attention.position": "rope",
        "*.feed_forward.bias": True,
    },
    keys=(
        Key("vocab_size", "vocab_size", 50400),
        Key("n_positions", "max_length", 2048, alias="max_position_embeddings"),
        Key("n_embd", "width", 4096, alias="hidden_size"),
        Key("n_layer", "depth", 28, alias="num_hidden_layers"),
        Key("tie_word_embeddings", "tie_embeddings", False),
        Key("n_head", "*.attention.heads", 16, alias="num_attention_heads"),
        Key("n_inner", "*.feed_forward.hidden", 0),
        Key("activation_function", "*.feed_forward.kind", "gelu_new", PLAIN),
        Key("layer_norm_epsilon", "*.norm_epsilon", 1e-5),
        Key("embd_pdrop", "dropout", 0.0),
        Key("resid_pdrop", "*.dropout", 0.0),
        Key("attn_pdrop", "*.attention.dropout", 0.0),
    ),
    rows=(
        row("transformer.wte.weight", "V D", "embed/table"),
        row("lm_head.weight", "V D", "head/table"),
        row("lm_head.bias", "V", "head_bias/bias"),
        *norm("transformer.ln_f", "final_norm"),
        *norm(f"{LAYER}.ln_1", "attention_norm_in"),
        row(f"{LAYER}.attn.q_proj.weight", "HK D", "attention/query/kernel", paired=True),
        row(f"{LAYER}.attn.k_proj.weight", "HK D", "attention/key/kernel", paired=True),
        row(f"{LAYER}.attn.v_proj.weight", "HK D", "attention/value/kernel"),
        row(f"{LAYER}.attn.out_proj.weight", "D HK", "attention/output/kernel"),
        *linear(f"{LAYER}.mlp.fc_in", "feed_forward/up", "F D"),
        *linear(f"{LAYER}.mlp.fc_out", "feed_forward/down", "D F"),
    ),
    rope=Rope(size="rotary_dim", size_default=64, theta="", scalings=("default",)),
    without_effect=("rotary", "scale_attn_weights"),
    ignored=(r".*\.attn\.(masked_)?bias", r".*\.attn\.embed_positions"),
)
