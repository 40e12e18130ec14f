"""The contribution of each part of a model to its final hidden states, for every layout (Elhage et al. 2021).

The final hidden state is a sum of terms: the embedding and the output of each sublayer. Each term is followed to the end:
through the skips, with their factors, and through the norms of the stream, which are linear maps once their factors are
fixed (models/norms.py, `frozen`). A sublayer without a skip drops all terms before it, because it only reads them. The
constants of norms (`constant`: the bias, and derf's value at 0) are terms too. So the terms times the output head sum to
the logits, before a softcap. With an encoder these are the terms of the decoder's stream, to
which cross-attention writes.
"""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xfresearch.analysis.sequences import Sequences, passed
from xfresearch.models.context import Source
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.stack import ends_with, layer_ends
from xfresearch.models.sublayers import Bound
from xfresearch.models.taps import captured, of_encoder, request
from xfresearch.models.transformer import Transformer
from xfresearch.runtime.errors import UserError

SITES = ("raw", "out", "sum", "residual", "heads", "gate")


class Pass(NamedTuple):
    """A forward pass: the model, the values of its taps and its final hidden states."""

    config: ModelConfig
    lm: Transformer
    values: dict[str, jax.Array]
    hidden_BLD: jax.Array


def not_followed(model: ModelConfig) -> str:
    """Why terms cannot be followed to the end of a model; '' if they can."""
    if model.head_activation != "none":
        return f"model.head_activation={model.head_activation!r}: the layer before the output matrix is no linear map"
    mixed = [each for each in model.sublayers() if not each.prefix and each.connection.adds_to == "mixture"]
    if not mixed:
        return ""
    others = "patching needs" if ends_with(model) else "tuned_lens and patching need"
    return f"{mixed[0].path} writes to {mixed[0].connection.mixes}, which later layers mix: {others} no terms"


def contributions(
    model: ModelConfig, params: dict, tokens_BL, by_head: bool = False, source: Source | None = None
) -> tuple[dict, object, jax.Array]:
    """{part: [B, L, D]}, the output head, and the final hidden states [B, L, D] that the parts sum to.

    Parts are 'embed', 'blocks.<layer>.<sublayer>', and with `by_head` 'blocks.<layer>.attention.<head>' with the rest of
    attention (biases, slots of the model's width) under 'blocks.<layer>.attention.rest'; the constants of norms are
    'blocks.<layer>.<sublayer>.norm' and 'final_norm'. source: what the encoder of a model with two stacks reads. It may be
    jitted. Raises UserError for a model whose terms cannot be followed."""
    forward_pass = recorded(model, params, Sequences(tokens_BL, source=source))
    return parts(forward_pass, by_head), forward_pass.lm.logit_head(), forward_pass.hidden_BLD


def recorded(model: ModelConfig, params: dict, rows: Sequences, more: tuple[str, ...] = ()) -> Pass:
    """A forward pass, with the values that attribution needs, and those of the taps `more`."""
    own = [name for name in tap_shapes(model) if not of_encoder(name)]
    names = ["embed", *(name for name in own if name.split(".")[-1] in (*SITES, *ends_with(model))), *more]
    lm, out = passed(model, params, rows, request(model, names))
    return Pass(model, lm, captured(model, out.captures, names), out.hidden_BLD)


def parts(forward_pass: Pass, by_head: bool = False) -> dict[str, jax.Array]:
    """{part: [B, L, D]} of the final hidden states."""
    return _followed(
        forward_pass,
        {"embed": forward_pass.values["embed"]},
        lambda each: _written(each, forward_pass.values, by_head),
    )


def directions(forward_pass: Pass, towards_BLD) -> dict[str, jax.Array]:
    """{'blocks.<layer>.<sublayer>': [B, L, D]}: the vector whose product with the sublayer's output, before its own norm and
    gain, is the sublayer's part of the product of the final hidden state with `towards`."""

    def total(raw: dict):
        def written(each: Bound) -> dict:
            branch, at = each.sublayer.branch, each.sublayer.path
            return {} if branch.bare else {at: scaled(each, raw[at], forward_pass.values[f"{at}.raw"])}

        terms = _followed(forward_pass, {}, written)
        return sum((term_BLD * towards_BLD).sum() for term_BLD in terms.values())

    model = forward_pass.config
    written = {name.removesuffix(".raw") for name in forward_pass.values if name.endswith(".raw")}
    written -= {each.path for each in model.sublayers() if each.branch.bare or each.prefix}
    return jax.grad(total)({name: jnp.zeros_like(forward_pass.values[f"{name}.raw"]) for name in written})


def _followed(forward_pass: Pass, start: dict, written: Callable) -> dict:
    """The terms at the end of the model, of those in `start`, which are in the stream before the first layer, and those that
    each sublayer writes: written(sublayer) -> {part: [B, L, D]}."""
    model, values = forward_pass.config, forward_pass.values
    if reason := not_followed(model):
        raise UserError(f"no contributions: {reason}")
    terms = second = start
    own = (each for each in forward_pass.lm.sublayers() if not each.sublayer.prefix)
    for _, of_layer in groupby(own, lambda each: each.sublayer.layer):
        before = terms
        for each in of_layer:
            block, branch, at = each.block, each.sublayer.branch, each.sublayer.path
            new = written(each)
            second = _add(second, new)
            terms = _add(_skipped(each, before if branch.connection.adds_to == "block" else terms), new)
            if "post" in branch.norms:
                terms = _normed(block.norm(branch, "post"), terms, values[f"{at}.sum"], f"{at}.norm")
    end = layer_ends(model)[-1]
    if names := ends_with(model):  # ResiDual's second stream: all other values are mixtures
        return _add(terms, _normed(forward_pass.lm.final_norm, second, values[f"{end}.{names[0]}"], "final_norm"))
    return _normed(forward_pass.lm.final_norm, terms, values[f"{end}.residual"], "final_norm")


def _add(terms: dict, more: dict) -> dict:
    return terms | {name: terms[name] + value if name in terms else value for name, value in more.items()}


def _normed(norm, terms: dict, at, name: str) -> dict:
    """The terms after a norm of their sum `at`."""
    normed = {part: norm.frozen(value, at) for part, value in terms.items()}
    constant = norm.constant()
    return normed if constant is None else _add(normed, {name: jnp.broadcast_to(constant, at.shape)})


def _skipped(each: Bound, terms: dict) -> dict:
    """The terms of the skip, to which the sublayer's output is added."""
    connection = each.sublayer.connection
    if connection.adds_to == "nothing":
        return {}
    return {part: connection.skipped(each.at, each.connection, value) for part, value in terms.items()}


def _written(each: Bound, values: dict, by_head: bool) -> dict:
    """{part: [B, L, D]}: the output of a sublayer as a whole, or of each head and the rest."""
    at = each.sublayer.path
    out_BLD = values[f"{at}.out"]
    if each.sublayer.branch.bare:
        return {}  # the next sublayer reads it
    output_HVD, heads = each.matrix("output"), values.get(f"{at}.heads")
    if not by_head or heads is None or output_HVD is None:
        return {at: out_BLD}
    if f"{at}.gate" in values:
        gate = values[f"{at}.gate"]
        heads = heads * (gate if gate.ndim == 4 else gate[..., None])
    written_HBLD = jnp.einsum("blhv,hvd->hbld", heads, output_HVD.astype(heads.dtype))
    parts = [scaled(each, part_BLD, values[f"{at}.raw"]) for part_BLD in written_HBLD]
    terms = {f"{at}.{number}": part_BLD for number, part_BLD in enumerate(parts)}
    return terms | {f"{at}.rest": out_BLD - sum(parts)}


def scaled(each: Bound, part_BLD, raw_BLD):
    """A part of a sublayer's output `raw`, after the sublayer's own norm and factor."""
    norm = each.block.norm(each.sublayer.branch, "out")
    part_BLD = part_BLD if norm is None else norm.frozen(part_BLD, raw_BLD)
    return each.sublayer.connection.scaled(each.at, each.connection, part_BLD)
