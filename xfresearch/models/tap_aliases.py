"""TransformerLens' names of taps (Nanda & Bloom 2022; its version 2), for those values that the two have in common."""

from functools import cache
from itertools import groupby

from xfresearch.models.model_config import ModelConfig
from xfresearch.models.norms import NormSpec
from xfresearch.models.stack import ends_with
from xfresearch.models.sublayers import Sublayer

# {role: {site of the sublayer: name in a block of TransformerLens}}
SITES = {
    "mixer": {
        "in": "ln1.hook_normalized",
        "unrotated_query": "attn.hook_q",
        "unrotated_key": "attn.hook_k",
        "query": "attn.hook_q",
        "key": "attn.hook_k",
        "value": "attn.hook_v",
        "weights": "attn.hook_pattern",
        "heads": "attn.hook_z",
        "out": "hook_attn_out",
    },
    "feed_forward": {
        "before": "hook_resid_mid",
        "in": "ln2.hook_normalized",
        "router_probabilities": "mlp.hook_expert_weights",
        "chosen": "mlp.hook_expert_indices",
        "pre_activation": "mlp.hook_pre",
        "multiplier": "mlp.hook_pre_linear",
        "hidden": "mlp.hook_mid",
        "coefficients": "mlp.hook_post",
        "out": "hook_mlp_out",
    },
}
UNROTATED = ("unrotated_query", "unrotated_key")  # that exist with RoPE alone
ROTATED = {"query": "attn.hook_rot_q", "key": "attn.hook_rot_k"}  # with RoPE
OUTSIDE = {"final": "ln_final.hook_normalized"}


@cache
def lens_names(model: ModelConfig) -> dict[str, str]:
    """{TransformerLens' name: our name}. Some of the values may not exist in this model. {} for a model with an encoder,
    whose blocks have other names in TransformerLens."""
    if model.encoder:
        return {}
    final = _is_normalized(model.norm_spec(model.final_norm)) and not ends_with(model) and model.head_activation == "none"
    names = {theirs: ours for ours, theirs in OUTSIDE.items()} if final else {}
    for number, of_layer in groupby(model.sublayers(), lambda each: each.layer.number):
        for site, name in _of_layer(list(of_layer)).items():
            names[f"blocks.{number}.{name}"] = f"blocks.{number}.{site}"
    return names


def _of_layer(sublayers: list[Sublayer]) -> dict[str, str]:
    """{our site: TransformerLens' name} of a layer. TransformerLens has no names for a role that several sublayers have."""
    aliases = {f"{sublayers[0].name}.before": "hook_resid_pre", f"{sublayers[-1].name}.residual": "hook_resid_post"}
    roles = [each.role for each in sublayers]
    between = roles == ["mixer", "feed_forward"] and all(
        each.connection.reads == each.connection.adds_to == "stream" for each in sublayers
    )
    norm = None  # that whose output the sublayer reads
    for each in sublayers:
        norm = norm if each.connection.reads == "before" else each.norm("in")
        if roles.count(each.role) > 1:
            continue
        names = SITES[each.role]
        if getattr(each.options, "position", "") == "rope":
            names = names | ROTATED
        else:
            names = {site: name for site, name in names.items() if site not in UNROTATED}
        normalized = norm is not None and _is_normalized(norm)
        unknown = ([] if normalized else ["in"]) + ([] if between else ["before"])
        aliases |= {f"{each.name}.{site}": name for site, name in names.items() if site not in unknown}
    return aliases


def _is_normalized(norm: NormSpec) -> bool:
    """Whether TransformerLens' hook_normalized is the norm's output: with LayerNorm it is after gain and bias, but with
    RMSNorm before the gain."""
    return norm.kind == "layer" or norm.kind in ("rms", "scale") and not norm.affine
