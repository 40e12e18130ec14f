"""T5 (Raffel et al. 2020): an encoder and a decoder, pre-norm RMSNorm, relative biases that the layers of a stack share.

v1.0 has a tied head, which reads the final hidden states times width^-1/2. v1.1 and Flan have a gate in the feed-forward
layer, and a head of their own without the factor. `transformers` ties the head unless the files have another one, and
keeps the factor as `scale_decoder_outputs`, which older folders give as `tie_word_embeddings`.
"""

from xfresearch.interop.family import Family, Key, TensorRow, Unsupported, in_both, keys_of_both, norm, of_encoder, row

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "swish"}
GATED = {"gelu": "geglu_tanh", "gelu_new": "geglu_tanh", "silu": "swiglu", "relu": "reglu"}
KINDS = ACTIVATIONS | {f"gated-{name}": kind for name, kind in GATED.items()}
FACTORS = {True: "inverse_sqrt_width", False: "none"}
HEAD, TABLE = "lm_head.weight", "shared.weight"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of the table; some folders have them alone


def attention(theirs: str, ours: str, source: str) -> tuple[TensorRow, ...]:
    """The four matrices of a sublayer that reads keys and values of a stream of width `source`."""
    pairs = {"q": ("query", "HK D"), "k": ("key", f"HK {source}"), "v": ("value", f"HK {source}"), "o": ("output", "D HK")}
    return tuple(row(f"{theirs}.{name}.weight", dims, f"{ours}/{part}/kernel") for name, (part, dims) in pairs.items())


def layers(stack: str, feed_forward: int) -> tuple[TensorRow, ...]:
    """The rows that both stacks have. The feed-forward layer is sublayer number `feed_forward`."""
    block = f"{stack}.block.{{layer}}.layer"
    dense = f"{block}.{feed_forward}.DenseReluDense"
    return (
        *attention(f"{block}.0.SelfAttention", "attention", "D"),
        *norm(f"{block}.0.layer_norm", "attention_norm_in"),
        row(f"{dense}.wi.weight", "F D", "feed_forward/up/kernel", gated=False),
        row(f"{dense}.wi_0.weight", "F D", "feed_forward/gate/kernel"),
        row(f"{dense}.wi_1.weight", "F D", "feed_forward/up/kernel", gated=True),
        row(f"{dense}.wo.weight", "D F", "feed_forward/down/kernel"),
        *norm(f"{block}.{feed_forward}.layer_norm", "feed_forward_norm_in"),
        row(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "R H", "shared/relative_bias"),
        *norm(f"{stack}.final_layer_norm", "final_norm"),
    )


def derived(config: dict) -> dict:
    """The decoder's depth and the factor of the head where their keys are missing. Raises Unsupported if the parts of
    feed_forward_proj are given as well and differ."""
    gate, _, activation = str(config.get("feed_forward_proj", "relu")).rpartition("-")
    parts = {"is_gated_act": gate == "gated", "dense_act_fn": activation}
    for key, value in parts.items():
        own = "gelu_new" if key == "dense_act_fn" and (gate, activation) == ("gated", "gelu") else value
        if config.get(key, own) != own:
            raise Unsupported(f"config.json: {key}={config[key]!r} is not allowed: feed_forward_proj says {own!r}")
    fields: dict = {}
    if config.get("num_decoder_layers") is None:
        fields["depth"] = config.get("num_hidden_layers", config.get("num_layers", 6))
    if "scale_decoder_outputs" not in config and config.get("tie_word_embeddings") is False:
        fields["head_scale"] = "none"
    return fields


def is_tied(stored: dict) -> bool:
    """The head is the embedding unless the files have another one."""
    table = next((stored[name] for name in (TABLE, *COPIES) if name in stored), None)
    return HEAD not in stored or table is None or stored[HEAD].equals(table)


FAMILY = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    fixed=in_both(
        {
            "final_norm": "rms",
            "*.norm": "rms",
            "*.norm_cast": "before_gain",
            "*.attention.position": "t5",
            "*.attention.scale": 1.0,
        }
    )
    | {"*.layout": "cross_pre_norm", "*.cross_attention.scale": 1.0},
    keys=(
        Key("vocab_size", "vocab_size", 32_128),
        *keys_of_both(Key("n_positions", "max_length", 512)),  # sizes of training: no parameter depends on it
        Key("d_model", "width", 512, alias="hidden_size"),
        Key("num_layers", "stacks.encoder.depth", 6, alias="num_hidden_layers"),
        Key("num_decoder_layers", "depth", 6),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("scale_decoder_outputs", "head_scale", True, FACTORS, null=False),
        *keys_of_both(
            Key("num_heads", "*.attention.heads", 8, alias="num_attention_heads"),
            Key("d_kv", "*.attention.head_size", 64, alias="head_dim"),
            Key("relative_attention_num_buckets", "*.attention.t5_buckets", 32),
            Key("relative_attention_max_distance", "*.attention.t5_distance", 128),
            Key("d_ff", "*.feed_forward.hidden", 2048),
            Key("feed_forward_proj", "*.feed_forward.kind", "relu", KINDS),
            Key("layer_norm_epsilon", "*.norm_epsilon", 1e-6),
            Key("dropout_rate", "dropout", 0.1),
            Key("dropout_rate", "*.dropout", 0.1),
            Key("dropout_rate", "*.attention.dropout", 0.1),
        ),
        Key("num_heads", "*.cross_attention.heads", 8, alias="num_attention_heads"),
        Key("d_kv", "*.cross_attention.head_size", 64, alias="head_dim"),
        Key("dropout_rate", "*.cross_attention.dropout", 0.1),
    ),
    derived=derived,
    of_tensors={"tie_embeddings": is_tied},
    rows=(
        row(TABLE, "V D", "embed/table"),
        row(HEAD, "V D", "head/table"),
        *of_encoder(layers("encoder", 1)),
        *layers("decoder", 2),
        *attention("decoder.block.{layer}.layer.1.EncDecAttention", "cross_attention", "W"),
        *norm("decoder.block.{layer}.layer.1.layer_norm", "cross_attention_norm_in"),
    ),
    needs={"is_encoder_decoder": True, "is_decoder": False},
    same_tensors=dict.fromkeys(COPIES, TABLE),
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),  # of early folders
    without_effect=("is_gated_act", "dense_act_fn", "output_past"),
)
