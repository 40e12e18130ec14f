"""What the model would predict after each layer, and which parts of it make the prediction.

logit lens (nostalgebraist 2020): the stream after a layer, read by the final norm and the head as if it were the last one:

    loss        of the next token, in nats                    agreement   share of tokens with the final most likely token
    divergence  KL(final || layer) in nats

direct attribution (contributions.py): the part of the logit of the next token, relative to the mean logit of the vocabulary,
that each sublayer, and each head of attention, adds. The parts sum to that relative logit, before a softcap.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.contributions import contributions
from xfresearch.analysis.result import HeatMap, Result, Table
from xfresearch.analysis.running import ROWS, about, batches, rows
from xfresearch.model_inputs import forward
from xfresearch.models import transformer
from xfresearch.models.block import Stream
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.stack import has_dual, layer_ends
from xfresearch.models.taps import captured, request
from xfresearch.progress import stage
from xfresearch.statistics import mean_interval

BATCH = 4
FIGURES = ("loss", "agreement", "divergence")


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    return "" if model.causal else "it predicts labels, not next tokens"


def lens(lm, data=None, count: int = ROWS, length: int = 0) -> Result:
    """The figures above on `count` rows of `length` tokens of `data` (running.rows).

    .data: loss, agreement, divergence [N]; attribution [parts], with their names in `parts`; by_sublayer [N, sublayers] and
    by_head [N, H] of it; name_rows: the same for each row. The intervals of .summary are over rows. Raises UserError for
    data that cannot be read."""
    tokens_NL = rows(lm, data, count, length)
    found: dict[str, list] = {}
    with stage("lens", len(tokens_NL), "rows") as progress:
        for tokens_BL in batches(tokens_NL, BATCH):
            read = by_depth(lm.config, lm.params, None, tokens_BL)
            parts = _attributed(lm.config, lm.params, tokens_BL)
            for name, value in (read | parts).items():
                found.setdefault(name, []).append(np.asarray(value, np.float64))
            progress.update(len(tokens_BL))
    per_row = {name: np.concatenate(values)[: len(tokens_NL)] for name, values in found.items()}
    figures = {name: per_row.pop(name) for name in FIGURES}
    data_found = {name: value.mean(0) for name, value in figures.items()}
    data_found |= {f"{name}_rows": value for name, value in figures.items()}
    data_found |= {"parts": np.array(list(per_row)), "attribution": np.array([value.mean() for value in per_row.values()])}
    data_found["attribution_rows"] = np.stack(list(per_row.values()), 1)
    data_found |= _grids(lm.config, dict(zip(per_row, data_found["attribution"], strict=True)))
    pictures, tables = _pictures(data_found), _tables(data_found)
    return Result("lens", about(lm, tokens_NL, data), lm.step, data_found, _summary(figures), pictures, tables)


@partial(jax.jit, static_argnums=0)
def by_depth(model: ModelConfig, params: dict, translators: dict | None, tokens_BL) -> dict:
    """{loss, agreement, divergence: [B, N]} of the streams after all layers, each read as if it were the last one.

    translators: those of the tuned lens, {matrix: [N, D, D], bias: [N, D]}, or None. Gradients go to them only."""
    ends = layer_ends(model)
    sites = ("residual", "dual") if has_dual(model) else ("residual",)
    lm, out = forward(model, params, tokens_BL, request(model, [f"{end}.{site}" for end in ends for site in sites]))
    values = captured(model, out.captures, [f"{end}.{site}" for end in ends for site in sites])
    streams = Stream(*(jax.lax.stop_gradient(jnp.stack([values[f"{end}.{site}"] for end in ends])) for site in sites))
    final_BLV = jax.lax.stop_gradient(jax.nn.log_softmax(lm.logits(out.hidden_BLD)))

    @jax.checkpoint
    def figures(inputs):
        stream, translator = inputs
        if translator is not None:
            matrix_DD, bias_D = (translator[name].astype(stream.x_BLD.dtype) for name in ("matrix", "bias"))
            stream = stream._replace(x_BLD=stream.x_BLD + stream.x_BLD @ matrix_DD + bias_D)
        bound = transformer.bind(model, params)
        log_p_BLV = jax.nn.log_softmax(bound.logits(bound.end(stream)))
        own_BL = jnp.take_along_axis(log_p_BLV[:, :-1], tokens_BL[:, 1:, None], -1)[..., 0]
        return {
            "loss": -own_BL.mean(1),
            "agreement": (log_p_BLV.argmax(-1) == final_BLV.argmax(-1)).mean(1),
            "divergence": (jnp.exp(final_BLV) * (final_BLV - log_p_BLV)).sum(-1).mean(1),
        }

    return {name: value.T for name, value in jax.lax.map(figures, (streams, translators)).items()}


@partial(jax.jit, static_argnums=0)
def _attributed(model: ModelConfig, params: dict, tokens_BL) -> dict:
    """{part: [B]}: its mean part of the next token's logit, relative to the mean logit of the vocabulary."""
    terms, head, _ = contributions(model, params, tokens_BL[:, :-1], by_head=True)
    wide = jnp.promote_types(head.table_VD.dtype, jnp.float32)
    table_VD = head.table_VD.astype(wide)
    towards_BLD = table_VD[tokens_BL[:, 1:]] - table_VD.mean(0)
    found = {part: jnp.einsum("bld,bld->bl", value.astype(wide), towards_BLD).mean(1) for part, value in terms.items()}
    if head.bias_V is not None:
        found["head_bias"] = (head.bias_V[tokens_BL[:, 1:]] - head.bias_V.mean()).mean(1)
    return found


def _grids(model: ModelConfig, attribution: dict[str, float]) -> dict[str, np.ndarray]:
    """by_sublayer [N, sublayers] and by_head [N, H] of {part: attribution}."""
    names = list(dict.fromkeys(name for block in model.blocks.values() for name in block.sublayers))
    of_sublayer = np.full((model.depth, len(names)), np.nan)
    of_heads: dict[int, dict[int, float]] = {}
    for part, value in attribution.items():
        if part.startswith("blocks."):
            _, number, sublayer, *rest = part.split(".")
            at = int(number), names.index(sublayer)
            of_sublayer[at] = np.nan_to_num(of_sublayer[at]) + value
            if rest and rest[0].isdigit():
                of_heads.setdefault(int(number), {})[int(rest[0])] = value
    found = {"by_sublayer": of_sublayer}
    if of_heads:
        by_head = np.full((model.depth, 1 + max(max(heads) for heads in of_heads.values())), np.nan)
        for number, heads in of_heads.items():
            by_head[number, list(heads)] = list(heads.values())
        found["by_head"] = by_head
    return found


def _summary(figures: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    middle = figures["loss"].shape[1] // 2
    found = {"loss": mean_interval(figures["loss"][:, -1])}
    if middle:
        found[f"loss after layer {middle - 1}"] = mean_interval(figures["loss"][:, middle - 1])
        found[f"agreement after layer {middle - 1}"] = mean_interval(figures["agreement"][:, middle - 1])
    return found


def _pictures(data: dict) -> tuple[HeatMap, ...]:
    caption = "part of the next token's logit, relative to the mean logit"
    maps = {"by_sublayer": ("Attribution by sublayer", "sublayer"), "by_head": ("Attribution by head", "head")}
    pictures = []
    for name, (title, columns) in maps.items():
        if name in data:
            most = float(np.nanmax(np.abs(data[name]))) or 1.0
            pictures.append(HeatMap(title, caption, data[name], "layer", columns, -most, most))
    return tuple(pictures)


def _tables(data: dict) -> tuple[Table, ...]:
    by_depth = [
        (str(n), *(round(float(data[name][n]), 4) for name in FIGURES))
        for n in range(len(data["loss"]))
    ]
    order = np.argsort(-np.abs(data["attribution"]))[:15]
    parts = [(str(data["parts"][i]), round(float(data["attribution"][i]), 4)) for i in order]
    titles = ("after layer", "loss in nats", "agreement", "divergence in nats")
    return (
        Table("Predictions by depth", "of the stream after a layer, read as if it were the last one", titles, by_depth),
        Table("Largest parts", "of the next token's logit, relative to the mean logit", ("part", "logit"), parts),
    )
