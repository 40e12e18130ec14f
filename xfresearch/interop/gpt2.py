"""GPT-2 (Radford et al. 2019): pre-norm LayerNorm, learned positions, biases, one QKV matrix, a tied head.

Its matrices are [inputs, outputs].
"""

from xfresearch.interop.family import Family, Key, norm, row
from xfresearch.models.mixers.softmax.options import PROJECTIONS

PLAIN = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "swish",
    "swish": "swish",
}


def linear(theirs: str, ours: str, dims: str):
    """The weight and bias of a `transformers` Conv1D. `dims` are inputs, then outputs."""
    return row(f"{theirs}.weight", dims, f"{ours}/kernel"), row(f"{theirs}.bias", dims.split()[1], f"{ours}/bias")


QKV = ("attention/query", "attention/key", "attention/value")

FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    fixed={
        "position": "learned",
        "final_norm": "layer",
        "*.norm": "layer",
        "*.norm_bias": True,
        "*.attention.bias": PROJECTIONS,
        "*.feed_forward.bias": True,
    },
    keys=(
        Key("vocab_size", "vocab_size", 50257),
        Key("n_positions", "max_length", 1024, alias="max_position_embeddings"),
        Key("n_embd", "width", 768, alias="hidden_size"),
        Key("n_layer", "depth", 12, alias="num_hidden_layers"),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("n_head", "*.attention.heads", 12, alias="num_attention_heads"),
        Key("n_inner", "*.feed_forward.hidden", 0),
        Key("activation_function", "*.feed_forward.kind", "gelu_new", PLAIN),
        Key("layer_norm_epsilon", "*.norm_epsilon", 1e-5),
        Key("embd_pdrop", "dropout", 0.1),
        Key("resid_pdrop", "*.dropout", 0.1),
        Key("attn_pdrop", "*.attention.dropout", 0.1),
    ),
    rows=(
        row("transformer.wte.weight", "V D", "embed/table"),
        row("transformer.wpe.weight", "L D", "position/table"),
        row("lm_head.weight", "V D", "head/table"),
        *norm("transformer.ln_f", "final_norm"),
        *norm("transformer.h.{layer}.ln_1", "attention_norm_in"),
        *norm("transformer.h.{layer}.ln_2", "feed_forward_norm_in"),
        row("transformer.h.{layer}.attn.c_attn.weight", "D 3HK", *(f"{name}/kernel" for name in QKV)),
        row("transformer.h.{layer}.attn.c_attn.bias", "3HK", *(f"{name}/bias" for name in QKV)),
        *linear("transformer.h.{layer}.attn.c_proj", "attention/output", "HK D"),
        *linear("transformer.h.{layer}.mlp.c_fc", "feed_forward/up", "D F"),
        *linear("transformer.h.{layer}.mlp.c_proj", "feed_forward/down", "F D"),
    ),
    needs={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ignored=(r".*\.attn\.(masked_)?bias",),
    without_effect=("summary_proj_to_labels",),
    prefix="transformer.",
)
