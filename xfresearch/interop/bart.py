"""BART (Lewis et al. 2020): an encoder and a decoder, post-norm, learned positions that begin at row 2 of their tables, a
norm of the embedding, no norm at the end of a stack, biases everywhere.

`transformers` adds `final_logits_bias`, mostly zeros, to the logits. The model has this parameter only if it is not 0.
"""

from xfresearch.interop.family import Family, Key, TensorRow, in_both, keys_of_both, linear, norm, of_encoder, row
from xfresearch.interop.gpt2 import PLAIN
from xfresearch.models.mixers.softmax.options import PROJECTIONS

LOGITS_BIAS = "final_logits_bias"


def attention(theirs: str, ours: str, source: str) -> tuple[TensorRow, ...]:
    """The four matrices and biases of a sublayer that reads keys and values of a stream of width `source`."""
    return (
        *linear(f"{theirs}.q_proj", f"{ours}/query", "HK D"),
        *linear(f"{theirs}.k_proj", f"{ours}/key", f"HK {source}"),
        *linear(f"{theirs}.v_proj", f"{ours}/value", f"HK {source}"),
        *linear(f"{theirs}.out_proj", f"{ours}/output", "D HK"),
        *norm(f"{theirs}_layer_norm", f"{ours}_norm_post"),
    )


def stack(name: str) -> tuple[TensorRow, ...]:
    """The rows that both stacks have."""
    layer = f"model.{name}.layers.{{layer}}"
    return (
        row(f"model.{name}.embed_positions.weight", "L D", "position/table"),
        *norm(f"model.{name}.layernorm_embedding", "embedding_norm"),
        *attention(f"{layer}.self_attn", "attention", "D"),
        *linear(f"{layer}.fc1", "feed_forward/up", "F D"),
        *linear(f"{layer}.fc2", "feed_forward/down", "D F"),
        *norm(f"{layer}.final_layer_norm", "feed_forward_norm_post"),
    )


def of_one(stack: str, prefix: str) -> tuple[Key, ...]:
    """The keys that each stack has of its own."""
    return (
        Key(f"{stack}_layers", f"{prefix}depth", 12, alias="num_hidden_layers" if prefix else ""),
        Key(f"{stack}_attention_heads", f"{prefix}*.attention.heads", 16, alias="num_attention_heads" if prefix else ""),
        Key(f"{stack}_ffn_dim", f"{prefix}*.feed_forward.hidden", 4096),
    )


FAMILY = Family(
    name="bart",
    architecture="BartForConditionalGeneration",
    fixed=in_both(
        {
            "position": "learned",
            "position_offset": 2,
            "embedding_norm": "layer",
            "final_norm": "none",
            "*.norm": "layer",
            "*.norm_bias": True,
            "*.norm_epsilon": 1e-5,
            "*.attention.bias": PROJECTIONS,
            "*.feed_forward.bias": True,
        }
    )
    | {"stacks.encoder.*.layout": "post_norm", "*.layout": "cross_post_norm", "*.cross_attention.bias": PROJECTIONS},
    keys=(
        Key("vocab_size", "vocab_size", 50_265),
        Key("d_model", "width", 1024, alias="hidden_size"),
        *of_one("encoder", "stacks.encoder."),
        *of_one("decoder", ""),
        Key("decoder_attention_heads", "*.cross_attention.heads", 16),
        Key("tie_word_embeddings", "tie_embeddings", True, {True: True}),  # otherwise each stack has a table of its own
        *keys_of_both(
            Key("max_position_embeddings", "max_length", 1024),
            Key("scale_embedding", "embedding_scale", False, {False: "none", True: "sqrt_width"}),
            Key("activation_function", "*.feed_forward.kind", "gelu", PLAIN),
            Key("dropout", "dropout", 0.1),
            Key("dropout", "*.dropout", 0.1),
            Key("attention_dropout", "*.attention.dropout", 0.0),
        ),
        Key("attention_dropout", "*.cross_attention.dropout", 0.0),
    ),
    of_tensors={"head_bias": lambda stored: LOGITS_BIAS in stored and bool(stored[LOGITS_BIAS].read().any())},
    rows=(
        row("model.shared.weight", "V D", "embed/table"),
        row("lm_head.weight", "V D", "head/table"),
        row(LOGITS_BIAS, "1 V", "head_bias/bias"),
        *of_encoder(stack("encoder")),
        *stack("decoder"),
        *attention("model.decoder.layers.{layer}.encoder_attn", "cross_attention", "W"),
    ),
    needs={"is_encoder_decoder": True, "is_decoder": False},
    same_tensors={f"model.{stack}.embed_tokens.weight": "model.shared.weight" for stack in ("encoder", "decoder")},
    ignored=(r"(model\.)?(encoder|decoder)\.version",),  # a mark of fairseq in early folders
    zeros={LOGITS_BIAS: lambda model: (1, model.vocab_size)},
    without_effect=(
        *("encoder_layerdrop", "decoder_layerdrop", "classif_dropout", "add_bias_logits", "add_final_layer_norm"),
        *("normalize_before", "normalize_embedding", "static_position_embeddings", "extra_pos_embeddings"),
    ),
    prefix="model.",
)
