"""RoBERTa (Liu et al. 2019): BERT whose positions begin at row 2 of their table, after that of padding, and whose head has
GELU whatever the activation of the layers is. Its published models have one token type."""

from xfresearch.interop.bert import FIXED, KEYS, NEEDS, encoder
from xfresearch.interop.family import Family, Key, Unsupported, count, linear, norm, row

OFFSET = 2  # pad_token_id + 1


def text_length(rows) -> int:
    """The longest text for a position table of so many rows. Raises Unsupported if it has none after the first two."""
    key = "max_position_embeddings"
    if count(key, rows) <= OFFSET:
        raise Unsupported(f"config.json: {key}={rows} is not allowed: it must be above {OFFSET}, where positions begin")
    return rows - OFFSET


FAMILY = Family(
    name="roberta",
    architecture="RobertaForMaskedLM",
    fixed=FIXED | {"position_offset": OFFSET, "head_activation": "gelu"},
    keys=(
        *KEYS,
        Key("vocab_size", "vocab_size", 50_265),
        Key("max_position_embeddings", "max_length", 512, read=text_length, write=lambda length: length + OFFSET),
    ),
    rows=(
        *encoder("roberta"),
        *linear("lm_head.dense", "head_layer/dense", "F D"),
        *norm("lm_head.layer_norm", "head_layer/norm"),
        row("lm_head.decoder.weight", "V D", "head/table"),
        row("lm_head.bias", "V", "head_bias/bias"),
    ),
    needs=NEEDS | {"pad_token_id": OFFSET - 1},
    same_tensors={"lm_head.decoder.bias": "lm_head.bias"},
    left_out={r"(roberta\.)?pooler\..*": "the pooler"},
    ignored=(r"(roberta\.)?embeddings\.(position|token_type)_ids",),
    prefix="roberta.",
)
