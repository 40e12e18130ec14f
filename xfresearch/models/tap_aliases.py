"""TransformerLens' names of taps (Nanda & Bloom 2022; its version 2), for those values that the two have in common."""

from functools import cache

from xfresearch.models import layers
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.model_config import ModelConfig

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
    found = {theirs: ours for ours, theirs in OUTSIDE.items()}
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
    return found if rope else {ours: theirs for ours, theirs in found.items() if ".unrotated_" not in ours}
