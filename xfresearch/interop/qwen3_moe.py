"""Qwen3's mixtures of experts (Yang et al. 2025): Qwen3 with experts in all layers or in some of them."""

from dataclasses import replace

from xfresearch.interop import llama, qwen3
from xfresearch.interop.by_layer import window_of, windowed, windows_of
from xfresearch.interop.family import BIASES, MISSING, ByLayer, Key, Unsupported, count, row

EXPERT = "model.layers.{layer}.mlp.experts.{expert}"
MOE = "*.feed_forward.moe."
KEYS = ("sliding_window", "use_sliding_window", "mlp_only_layers", "decoder_sparse_step", "intermediate_size")
DENSE_HIDDEN = Key("intermediate_size", "*.feed_forward.hidden", 6144)


def read(config: dict, changes: dict) -> list[tuple[str, dict]]:
    """The window of all layers, and the layers that have one feed-forward layer instead of experts."""
    window = window_of(config, 4096) if config.get("use_sliding_window", False) else 0
    name, fields = windowed(window)
    dense = {path: MISSING for path in changes if path.startswith(MOE)}
    dense |= {DENSE_HIDDEN.ours: DENSE_HIDDEN.from_config(config)}
    dense |= {"*.feed_forward.kind": changes[f"{MOE}expert"]}
    own = {True: (f"{name}_dense", fields | dense), False: (name, fields)}
    numbers = dense_layers(config, changes["depth"])
    return [own[number in numbers] for number in range(changes["depth"])]


def dense_layers(config: dict, depth: int) -> set[int]:
    """The numbers of the layers without experts."""
    given = config.get("mlp_only_layers") or []
    if not isinstance(given, list) or not all(type(number) is int for number in given):
        raise Unsupported(f"config.json: mlp_only_layers={given!r} has the wrong type: it must be a list of integers")
    step = count("decoder_sparse_step", config.get("decoder_sparse_step", 1)) or 1
    return {number for number in range(depth) if number in given or (number + 1) % step}


def write(blocks: list) -> dict:
    window = windows_of(blocks)[0]
    keys: dict = {"use_sliding_window": window > 0, "sliding_window": window or None, "decoder_sparse_step": 1}
    layers = [getattr(block, "feed_forward", None) for block in blocks]  # a layout may have none
    keys["mlp_only_layers"] = [number for number, layer in enumerate(layers) if not hasattr(layer, "moe")]
    for layer in layers:
        name = "moe_intermediate_size" if hasattr(layer, "moe") else "intermediate_size"
        keys[name] = getattr(layer, "hidden", 1)
    return keys


FAMILY = replace(
    qwen3.FAMILY,
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fixed={**qwen3.FAMILY.fixed, "*.feed_forward.kind": "moe"},
    keys=(
        *(key for key in llama.KEYS if key.theirs != DENSE_HIDDEN.theirs),
        llama.kv_heads(4),
        Key("max_position_embeddings", "max_length", 32768),
        Key("attention_bias", "*.attention.bias", False, BIASES),
        Key("moe_intermediate_size", "*.feed_forward.hidden", 768),
        Key("hidden_act", f"{MOE}expert", "silu", llama.GATED),
        Key("num_experts", f"{MOE}experts", 128, alias="num_local_experts"),
        Key("num_experts_per_tok", f"{MOE}top_k", 8),
        Key("norm_topk_prob", f"{MOE}renormalise", False),
        Key("router_aux_loss_coef", f"{MOE}balance_loss", 0.001),
    ),
    rows=(
        *llama.FAMILY.rows,
        *qwen3.QK_NORMS,
        row("model.layers.{layer}.mlp.gate.weight", "E D", "feed_forward/router/kernel"),
        row(f"{EXPERT}.gate_proj.weight", "F D", "feed_forward/experts/gate"),
        row(f"{EXPERT}.up_proj.weight", "F D", "feed_forward/experts/up"),
        row(f"{EXPERT}.down_proj.weight", "D F", "feed_forward/experts/down"),
    ),
    without_effect=("max_window_layers",),
    by_layer=ByLayer(read, write, KEYS),
)
