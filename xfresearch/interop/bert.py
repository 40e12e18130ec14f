"""BERT (Devlin et al. 2019) with its masked-language head: an encoder alone, post-norm, learned positions, token types, a
norm of the embedding, biases everywhere, and a layer before the tied output matrix.

A folder's pooler and its next-sentence head, which read the first token for classes, are left out. Folders of 2018, such as
bert-base-uncased, call gains gamma and biases beta.
"""

from xfresearch.interop.family import Family, Key, TensorRow, linear, norm, row
from xfresearch.interop.gpt2 import PLAIN
from xfresearch.models.mixers.softmax.options import PROJECTIONS

FIXED = {
    "causal": False,
    "position": "learned",
    "embedding_norm": "layer",
    "final_norm": "none",
    "head_norm": "layer",
    "head_bias": True,
    "*.layout": "post_norm",
    "*.norm": "layer",
    "*.norm_bias": True,
    "*.attention.bias": PROJECTIONS,
    "*.feed_forward.bias": True,
}
KEYS = (
    Key("hidden_size", "width", 768),
    Key("num_hidden_layers", "depth", 12),
    Key("num_attention_heads", "*.attention.heads", 12),
    Key("intermediate_size", "*.feed_forward.hidden", 3072),
    Key("hidden_act", "*.feed_forward.kind", "gelu", PLAIN),
    # `transformers` cannot run a table without rows: a model that has none is refused, because it differs when it is read.
    Key("type_vocab_size", "token_types", 2, write=lambda types: max(types, 1)),
    Key("layer_norm_eps", "*.norm_epsilon", 1e-12),
    Key("hidden_dropout_prob", "dropout", 0.1),
    Key("hidden_dropout_prob", "*.dropout", 0.1),
    Key("attention_probs_dropout_prob", "*.attention.dropout", 0.1),
)
# The output matrix may be untied, and then has a bias of its own, which our models would not tell from the head's.
NEEDS = {"tie_word_embeddings": True, "position_embedding_type": "absolute"}
NEEDS |= {"is_decoder": False, "add_cross_attention": False}
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


def encoder(name: str) -> tuple[TensorRow, ...]:
    """The embedding and the layers, whose tensors have this prefix."""
    embeddings, layer = f"{name}.embeddings", f"{name}.encoder.layer.{{layer}}"
    return (
        row(f"{embeddings}.word_embeddings.weight", "V D", "embed/table"),
        row(f"{embeddings}.position_embeddings.weight", "L D", "position/table"),
        row(f"{embeddings}.token_type_embeddings.weight", "Y D", "token_type/table"),
        *norm(f"{embeddings}.LayerNorm", "embedding_norm"),
        *linear(f"{layer}.attention.self.query", "attention/query", "HK D"),
        *linear(f"{layer}.attention.self.key", "attention/key", "HK D"),
        *linear(f"{layer}.attention.self.value", "attention/value", "HK D"),
        *linear(f"{layer}.attention.output.dense", "attention/output", "D HK"),
        *norm(f"{layer}.attention.output.LayerNorm", "attention_norm_post"),
        *linear(f"{layer}.intermediate.dense", "feed_forward/up", "F D"),
        *linear(f"{layer}.output.dense", "feed_forward/down", "D F"),
        *norm(f"{layer}.output.LayerNorm", "feed_forward_norm_post"),
    )


FAMILY = Family(
    name="bert",
    architecture="BertForMaskedLM",
    fixed=FIXED,
    keys=(
        *KEYS,
        Key("vocab_size", "vocab_size", 30_522),
        Key("max_position_embeddings", "max_length", 512),
        Key("hidden_act", "head_activation", "gelu", PLAIN),
    ),
    rows=(
        *encoder("bert"),
        *linear("cls.predictions.transform.dense", "head_layer/dense", "F D"),
        *norm("cls.predictions.transform.LayerNorm", "head_layer/norm"),
        row("cls.predictions.decoder.weight", "V D", "head/table"),
        row("cls.predictions.bias", "V", "head_bias/bias"),
    ),
    needs=NEEDS,
    same_tensors={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    left_out={r"(bert\.)?pooler\..*": "the pooler", r"cls\.seq_relationship\..*": "the next-sentence head"},
    old_names=OLD_NAMES,
    ignored=(r"(bert\.)?embeddings\.(position|token_type)_ids",),
    without_effect=(
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
        *("pooler_type", "gradient_checkpointing"),
    ),
    prefix="bert.",
)
