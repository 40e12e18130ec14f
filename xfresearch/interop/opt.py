"""OPT (Zhang et al. 2022): GPT-2 with ReLU, separate query, key and value matrices, and a position table whose first
two rows are unused. One of its sizes is post-norm, without a norm before the head."""

from xfresearch.interop.family import BIASES, Family, Key, linear, norm, row
from xfresearch.interop.gpt2 import PLAIN

LAYER = "model.decoder.layers.{layer}"

FAMILY = Family(
    name="opt",
    architecture="OPTForCausalLM",
    fixed={
        "position": "learned",
        "position_offset": 2,
        "*.norm": "layer",
        "*.norm_epsilon": 1e-5,
    },
    keys=(
        Key("vocab_size", "vocab_size", 50272),
        Key("max_position_embeddings", "max_length", 2048),
        Key("hidden_size", "width", 768),
        Key("num_hidden_layers", "depth", 12),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("_remove_final_layer_norm", "final_norm", False, {False: "layer", True: "none"}),
        Key("do_layer_norm_before", "*.layout", True, {True: "pre_norm", False: "post_norm"}),
        Key("layer_norm_elementwise_affine", "*.norm_gain", True),
        Key("layer_norm_elementwise_affine", "*.norm_bias", True),
        Key("num_attention_heads", "*.attention.heads", 12),
        Key("enable_bias", "*.attention.bias", True, BIASES),
        Key("enable_bias", "*.feed_forward.bias", True),
        Key("ffn_dim", "*.feed_forward.hidden", 3072),
        Key("activation_function", "*.feed_forward.kind", "relu", PLAIN),
        Key("dropout", "*.dropout", 0.1),
        Key("attention_dropout", "*.attention.dropout", 0.0),
    ),
    derived=lambda config: {"final_norm": "none"} if config.get("do_layer_norm_before") is False else {},
    rows=(
        row("model.decoder.embed_tokens.weight", "V D", "embed/table"),
        row("model.decoder.embed_positions.weight", "L D", "position/table"),
        row("lm_head.weight", "V D", "head/table"),
        *norm("model.decoder.final_layer_norm", "final_norm"),
        *norm(f"{LAYER}.self_attn_layer_norm", "attention_norm_in"),
        *norm(f"{LAYER}.self_attn_layer_norm", "attention_norm_post"),
        *norm(f"{LAYER}.final_layer_norm", "feed_forward_norm_in"),
        *norm(f"{LAYER}.final_layer_norm", "feed_forward_norm_post"),
        *linear(f"{LAYER}.self_attn.q_proj", "attention/query", "HK D"),
        *linear(f"{LAYER}.self_attn.k_proj", "attention/key", "HK D"),
        *linear(f"{LAYER}.self_attn.v_proj", "attention/value", "HK D"),
        *linear(f"{LAYER}.self_attn.out_proj", "attention/output", "D HK"),
        *linear(f"{LAYER}.fc1", "feed_forward/up", "F D"),
        *linear(f"{LAYER}.fc2", "feed_forward/down", "D F"),
    ),
    same={"word_embed_proj_dim": "hidden_size"},
    prefix="model.",
)
