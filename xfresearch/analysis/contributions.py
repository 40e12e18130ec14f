"""What each part of a model adds to its final hidden states, for every layout (Elhage et al. 2021).

The final hidden state is a sum over the embedding and what each sublayer writes. Each term is followed to the end: through
the skips, with their factors, and through the norms of the stream, as the linear maps that they are at this value
(models/norms.py, `frozen`). A layout without a skip drops the terms before it, because they are only read. The biases of
norms are terms too. So the terms times the output head sum to the logits, before a softcap.
"""

import jax
import jax.numpy as jnp

from xfresearch.model_inputs import forward, tap_shapes
from xfresearch.models import layers
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.stack import has_dual, layer_ends
from xfresearch.models.taps import captured, request

SITES = ("raw", "out", "sum", "dual", "residual", "heads", "gate")


def contributions(model: ModelConfig, params: dict, tokens_BL, by_head: bool = False) -> tuple[dict, object, jax.Array]:
    """{part: [B, L, D]}, the output head, and the final hidden states [B, L, D] that the parts sum to.

    Parts are 'embed', 'blocks.<layer>.<sublayer>', and with `by_head` 'blocks.<layer>.attention.<head>' with the rest of
    attention (biases, slots of the model's width) under 'blocks.<layer>.attention.rest'; the biases of norms are
    'blocks.<layer>.<sublayer>.norm' and 'final_norm'. It may be jitted."""
    shapes = tap_shapes(model)
    names = ["embed", *(name for name in shapes if name.split(".")[-1] in SITES)]
    lm, out = forward(model, params, tokens_BL, request(model, names))
    values = captured(model, out.captures, names)
    terms = {"embed": values["embed"]}
    second = {"embed": values["embed"]} if has_dual(model) else {}
    for layer in layers.layers(model):
        block = jax.tree.map(lambda leaf, index=layer.index: leaf[index], lm.blocks[layer.stack])
        start = terms
        for sublayer in block.layout.sublayers:
            at = f"blocks.{layer.number}.{sublayer.name}"
            written = _written(block, sublayer, at, values, by_head)
            second = _add(second, written) if second and not sublayer.bare else second
            terms = _add(_skipped(block, sublayer, start if sublayer.skip == "block" else terms), written)
            if "post" in sublayer.norms:
                norm = getattr(block, f"{sublayer.name}_norm_post")
                terms = _normed(norm, terms, values[f"{at}.sum"], f"{at}.norm")
    name = layer_ends(model)[-1]
    if second:
        terms = _add(terms, _normed(lm.final_norm, second, values[f"{name}.dual"], "final_norm"))
    else:
        terms = _normed(lm.final_norm, terms, values[f"{name}.residual"], "final_norm")
    return terms, lm.logit_head(), out.hidden_BLD


def _add(terms: dict, more: dict) -> dict:
    return terms | {name: terms[name] + value if name in terms else value for name, value in more.items()}


def _normed(norm, terms: dict, at, name: str) -> dict:
    """The terms after a norm of their sum `at`."""
    found = {part: norm.frozen(value, at) for part, value in terms.items()}
    return found if norm.bias is None else _add(found, {name: jnp.broadcast_to(norm.bias[...], at.shape)})


def _skipped(block, sublayer, terms: dict) -> dict:
    """The terms of the skip, to which the sublayer's output is added."""
    if sublayer.skip == "none":
        return {}
    factor = getattr(block, f"{sublayer.name}_skip_gain")[...] if sublayer.skip_gain else block.skip_scale
    return {part: factor * value for part, value in terms.items()}


def _written(block, sublayer, at: str, values: dict, by_head: bool) -> dict:
    """What a sublayer writes: as a whole, or of each head and the rest."""
    out_BLD = values[f"{at}.out"]
    if sublayer.bare:
        return {}  # the next sublayer reads it
    linear = getattr(getattr(block, sublayer.name), "output", None)
    heads = values.get(f"{at}.heads")
    if not by_head or heads is None or linear is None or linear.kernel.shape[:2] != heads.shape[2:]:
        return {at: out_BLD}
    if f"{at}.gate" in values:
        gate = values[f"{at}.gate"]
        heads = heads * (gate if gate.ndim == 4 else gate[..., None])
    parts = jnp.einsum("blhv,hvd->hbld", heads, linear.kernel[...].astype(heads.dtype))
    norm = getattr(block, f"{sublayer.name}_norm_out", None)
    parts = parts if norm is None else jnp.stack([norm.frozen(part, values[f"{at}.raw"]) for part in parts])
    if sublayer.gain:
        parts = parts * getattr(block, f"{sublayer.name}_gain")[...]
    found = {f"{at}.{number}": part for number, part in enumerate(parts)}
    return found | {f"{at}.rest": out_BLD - parts.sum(0)}
