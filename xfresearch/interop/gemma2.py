"""Gemma 2 (Gemma Team 2024b): Gemma with norms before and after each sublayer, a sliding window in every other layer,
and softcaps of the attention logits and of the output logits."""

from dataclasses import replace

from xfresearch.interop import gemma, llama
from xfresearch.interop.by_layer import every, some_layers
from xfresearch.interop.family import Key, Unsupported, norm, number


def scale(scalar) -> float:
    """The scale of the attention logits: query_pre_attn_scalar^(-1/2). Export writes integers only, because `transformers`
    refuses other numbers."""
    if number("query_pre_attn_scalar", scalar) <= 0:
        raise Unsupported(f"config.json: query_pre_attn_scalar={scalar!r} is not allowed: it must be above 0")
    return scalar**-0.5


def softcap(theirs: str, ours: str, default: float) -> Key:
    """The key of a softcap of logits; null means no cap."""
    return Key(theirs, ours, default, null=0.0, write=lambda cap: cap or None)


FAMILY = replace(
    gemma.FAMILY,
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    fixed={**gemma.FAMILY.fixed, "*.layout": "peri_norm"},
    keys=(
        *(key for key in gemma.FAMILY.keys if key.theirs != "hidden_act"),
        llama.kv_heads(4),
        Key("hidden_activation", "*.feed_forward.kind", "gelu_pytorch_tanh", llama.GATED),
        Key("query_pre_attn_scalar", "*.attention.scale", 256, read=scale, write=lambda x: round(x**-2) if x else None),
        softcap("attn_logit_softcapping", "*.attention.softcap", 50.0),
        softcap("final_logit_softcapping", "logit_softcap", 30.0),
    ),
    rows=(
        *llama.EMBEDDING,
        *norm("model.layers.{layer}.input_layernorm", "attention_norm_in"),
        *norm("model.layers.{layer}.post_attention_layernorm", "attention_norm_out"),
        *norm("model.layers.{layer}.pre_feedforward_layernorm", "feed_forward_norm_in"),
        *norm("model.layers.{layer}.post_feedforward_layernorm", "feed_forward_norm_out"),
        *llama.ATTENTION,
        *llama.FEED_FORWARD,
    ),
    by_layer=some_layers(every(2), default=4096),
    without_effect=("hidden_act",),
    needs={"use_bidirectional_attention": False},
)
