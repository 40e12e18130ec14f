"""GPT-Neo (Black et al. 2021): GPT-2 with a window in every other layer, logits without a scale, and matrices of their own
for queries, keys and values, without biases."""

from xfresearch.interop.by_layer import period_of, windowed, windows_of
from xfresearch.interop.family import ByLayer, Family, Key, Unsupported, count, linear, norm, row
from xfresearch.interop.gpt2 import PLAIN

LAYER = "transformer.h.{layer}"
GLOBAL, LOCAL = TYPES = ("global", "local")


def read(config: dict, changes: dict) -> list[tuple[str, dict]]:
    """attention_types is [[types, repeats], ...], and attention_layers the types themselves, which `transformers` obeys:
    folders in which they differ are refused."""
    window = count("window_size", config.get("window_size", 256))
    layers = config.get("attention_layers")
    alone = layers is not None and config.get("attention_types") is None
    types = expanded([[layers, 1]] if alone else config.get("attention_types") or [[[GLOBAL, LOCAL], 12]], changes["depth"])
    if layers not in (None, types):
        raise Unsupported(f"config.json: attention_layers={layers!r} is not allowed: attention_types says {types!r}")
    return [windowed(window if kind == LOCAL else 0) for kind in types]


def expanded(given: list, depth: int) -> list[str]:
    """The type of each layer. Raises Unsupported if they are not `depth` known types."""
    try:
        types = [kind for kinds, repeats in given for _ in range(min(repeats, depth)) for kind in kinds]
        known = set(types) <= set(TYPES)
    except (TypeError, ValueError):
        known = False
    if not known:
        raise Unsupported(f"config.json: attention_types={given!r} is not allowed: it must be such as [[{TYPES}, 12]]")
    if len(types) != depth:
        raise Unsupported(f"config.json: attention_types has {len(types)} types for {depth} layers")
    return types


def write(blocks: list) -> dict:
    windows = windows_of(blocks)
    types = [LOCAL if window else GLOBAL for window in windows]
    period = period_of(types)
    own = {"window_size": max(windows)} if any(windows) else {}
    return {"attention_types": [[period, len(types) // len(period)]], "attention_layers": types, **own}


FAMILY = Family(
    name="gpt_neo",
    architecture="GPTNeoForCausalLM",
    fixed={
        "position": "learned",
        "final_norm": "layer",
        "*.norm": "layer",
        "*.norm_bias": True,
        "*.attention.scale": 1.0,
        "*.attention.bias": ("output",),
        "*.feed_forward.bias": True,
    },
    keys=(
        Key("vocab_size", "vocab_size", 50257),
        Key("max_position_embeddings", "max_length", 2048),
        Key("hidden_size", "width", 2048),
        Key("num_layers", "depth", 24, alias="num_hidden_layers"),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("num_heads", "*.attention.heads", 16, alias="num_attention_heads"),
        Key("intermediate_size", "*.feed_forward.hidden", 0),
        Key("activation_function", "*.feed_forward.kind", "gelu_new", PLAIN),
        Key("layer_norm_epsilon", "*.norm_epsilon", 1e-5),
        Key("embed_dropout", "dropout", 0.0),
        Key("resid_dropout", "*.dropout", 0.0),
        Key("attention_dropout", "*.attention.dropout", 0.0),
    ),
    rows=(
        row("transformer.wte.weight", "V D", "embed/table"),
        row("transformer.wpe.weight", "L D", "position/table"),
        row("lm_head.weight", "V D", "head/table"),
        *norm("transformer.ln_f", "final_norm"),
        *norm(f"{LAYER}.ln_1", "attention_norm_in"),
        *norm(f"{LAYER}.ln_2", "feed_forward_norm_in"),
        row(f"{LAYER}.attn.attention.q_proj.weight", "HK D", "attention/query/kernel"),
        row(f"{LAYER}.attn.attention.k_proj.weight", "HK D", "attention/key/kernel"),
        row(f"{LAYER}.attn.attention.v_proj.weight", "HK D", "attention/value/kernel"),
        *linear(f"{LAYER}.attn.attention.out_proj", "attention/output", "D HK"),
        *linear(f"{LAYER}.mlp.c_fc", "feed_forward/up", "F D"),
        *linear(f"{LAYER}.mlp.c_proj", "feed_forward/down", "D F"),
    ),
    by_layer=ByLayer(read, write, ("attention_types", "attention_layers", "window_size")),
    ignored=(r".*\.attn\.attention\.(masked_)?bias",),
    prefix="transformer.",
)
