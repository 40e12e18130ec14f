"""TransformerLens' names of taps (Nanda & Bloom 2022; its version 2), for those values that the two have in common."""

from functools import cache

from xfresearch.models import layers
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.norms import NormSpec

# site: name in a block of TransformerLens
SITES = {
    "attention.in": "ln1.hook_normalized",
    "attention.unrotated_query": "attn.hook_q",
    "attention.unrotated_key": "attn.hook_k",
    "attention.query": "attn.hook_q",
    "attention.key": "attn.hook_k",
    "attention.value": "attn.hook_v",
    "attention.weights": "attn.hook_pattern",
    "attention.heads": "attn.hook_z",
    "attention.out": "hook_attn_out",
    "feed_forward.before": "hook_resid_mid",
    "feed_forward.in": "ln2.hook_normalized",
    "feed_forward.router_probabilities": "mlp.hook_expert_weights",
    "feed_forward.chosen": "mlp.hook_expert_indices",
    "feed_forward.pre_activation": "mlp.hook_pre",
    "feed_forward.multiplier": "mlp.hook_pre_linear",
    "feed_forward.hidden": "mlp.hook_mid",
    "feed_forward.coefficients": "mlp.hook_post",
    "feed_forward.out": "hook_mlp_out",
}
ROTATED = {"attention.query": "attn.hook_rot_q", "attention.key": "attn.hook_rot_k"}  # in a block with RoPE
OUTSIDE = {"final": "ln_final.hook_normalized"}


@cache
def lens_names(model: ModelConfig) -> dict[str, str]:
    """{TransformerLens' name: our name}. Some of the values may not exist in this model."""
    dual = any(LAYOUTS[block.layout].dual for block in model.blocks.values())
    final = _is_normalized(model.norm_spec(model.final_norm)) and not dual
    found = {theirs: ours for ours, theirs in OUTSIDE.items()} if final else {}
    for layer in layers.layers(model):
        for site, name in _block(model, layer.block).items():
            found[f"blocks.{layer.number}.{name}"] = f"blocks.{layer.number}.{site}"
    return found


def _block(model: ModelConfig, block: str) -> dict[str, str]:
    """{our site: their name} of a block."""
    options = model.blocks[block]
    sublayers = LAYOUTS[options.layout].sublayers
    rope = getattr(options.attention, "position", "") == "rope"
    ends = {f"{sublayers[0].name}.before": "hook_resid_pre", f"{sublayers[-1].name}.residual": "hook_resid_post"}
    found = SITES | (ROTATED if rope else {}) | ends
    if not all(s.reads == "stream" and s.skip == "stream" for s in sublayers):
        del found["feed_forward.before"]  # there is no stream between the sublayers
    norm = None  # that whose output the sublayer reads
    for s in sublayers:
        if s.reads != "before":
            norm = options.norm_at(f"{s.name}_in") if "in" in s.norms else None
        if norm is None or not _is_normalized(norm):
            del found[f"{s.name}.in"]
    return found if rope else {ours: theirs for ours, theirs in found.items() if ".unrotated_" not in ours}


def _is_normalized(norm: NormSpec) -> bool:
    """Whether TransformerLens' hook_normalized is the norm's output: that of LayerNorm is after gain and bias, but that of
    RMSNorm before the gain."""
    return norm.kind == "layer" or norm.kind in ("rms", "scale") and not norm.affine
