"""The tuned lens (Belrose et al. 2023): a trained translator for each layer, so that its stream predicts like the model.

    logits_l = head(final_norm(h_l + A_l h_l + b_l))        A_l [D, D] and b_l [D] start at 0: the logit lens

The translators minimise KL(final || logits_l), in nats, on text of the train split, with Adam. The model does not change. Of
each layer, with and without them: loss of the next token, agreement with the final most likely token, and the divergence, on
other rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xfresearch.analysis.result import HeatMap, Result, Table
from xfresearch.analysis.running import about, batches, rows
from xfresearch.model_inputs import forward
from xfresearch.models import layers, transformer
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.stack import has_dual
from xfresearch.models.taps import captured, request
from xfresearch.progress import stage
from xfresearch.statistics import mean_interval

ROWS = 32
BATCH = 8
STEPS = 300
RATE = 1e-3
FIGURES = ("loss", "agreement", "divergence")


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    if not model.causal:
        return "it predicts labels, not next tokens"
    return "its final norm reads a second stream" if has_dual(model) else ""


def tuned_lens(lm, data=None, count: int = ROWS, length: int = 0, steps: int = STEPS, training=None) -> Result:
    """Trains the translators for `steps` batches of `training` (token ids [N, L]; None for the train split of `data`), and
    measures on `count` rows of `length` tokens of `data` (running.rows).

    .data: loss, agreement, divergence, tuned_loss, tuned_agreement, tuned_divergence [N], the same for each row (name_rows),
    and the translators: matrix [N, D, D], bias [N, D]. The intervals of .summary are over rows. Raises UserError for data
    that cannot be read."""
    tokens_NL = rows(lm, data, count, length)
    if training is None:
        training = rows(lm, data, steps * BATCH, length, split="train")
    found = train(lm, np.asarray(training), steps)
    per_row: dict[str, list] = {}
    for tokens_BL in batches(tokens_NL, BATCH):
        for name, translators in (("", None), ("tuned_", found)):
            values = _figures(lm.config, lm.params, translators, tokens_BL)
            for figure, value in zip(FIGURES, values, strict=True):
                per_row.setdefault(name + figure, []).append(np.asarray(value, np.float64))
    measured = {name: np.concatenate(parts)[: len(tokens_NL)] for name, parts in per_row.items()}
    data_found = {name: value.mean(0) for name, value in measured.items()} | {k: np.asarray(v) for k, v in found.items()}
    data_found |= {f"{name}_rows": value for name, value in measured.items()}
    summary = {name.replace("_", " "): mean_interval(value[:, :-1].mean(1)) for name, value in measured.items()}
    line = about(lm, tokens_NL, data)
    return Result("tuned_lens", line, lm.step, data_found, summary, _pictures(data_found), (_table(data_found),))


def train(lm, tokens_NL: np.ndarray, steps: int) -> dict[str, jax.Array]:
    """The translators {matrix: [N, D, D], bias: [N, D]} after `steps` batches of the rows, which repeat."""
    depth, width = lm.config.depth, lm.config.width
    translators = {"matrix": jnp.zeros((depth, width, width)), "bias": jnp.zeros((depth, width))}
    optimizer = optax.adam(optax.linear_schedule(RATE, 0.0, steps))
    state = optimizer.init(translators)
    size = min(BATCH, len(tokens_NL))
    with stage("tuned lens", steps, "steps") as progress:
        for number in range(steps):
            chosen = np.arange(number * size, (number + 1) * size) % len(tokens_NL)
            translators, state = _step(lm.config, steps, lm.params, translators, state, tokens_NL[chosen])
            progress.update(1)
    return translators


@partial(jax.jit, static_argnums=(0, 1))
def _step(model: ModelConfig, steps: int, params: dict, translators: dict, state, tokens_BL):
    optimizer = optax.adam(optax.linear_schedule(RATE, 0.0, steps))

    def loss(translators):
        return _figures(model, params, translators, tokens_BL)[2].mean(0).sum()

    updates, state = optimizer.update(jax.grad(loss)(translators), state)
    return optax.apply_updates(translators, updates), state


@partial(jax.jit, static_argnums=0)
def _figures(model: ModelConfig, params: dict, translators: dict | None, tokens_BL) -> tuple:
    """(loss, agreement, divergence), each [B, N], of the streams after all layers."""
    ends = [f"blocks.{n.number}.{LAYOUTS[model.blocks[n.block].layout].sublayers[-1].name}" for n in layers.layers(model)]
    names = [f"{end}.residual" for end in ends]
    lm, out = forward(model, params, tokens_BL, request(model, names))
    streams_NBLD = jax.lax.stop_gradient(jnp.stack(list(captured(model, out.captures, names).values())))
    final_BLV = jax.lax.stop_gradient(jax.nn.log_softmax(lm.logits(out.hidden_BLD)))

    @jax.checkpoint
    def layer(inputs):
        x_BLD, translator = inputs
        if translator is not None:
            moved = x_BLD @ translator["matrix"].astype(x_BLD.dtype) + translator["bias"].astype(x_BLD.dtype)
            x_BLD = x_BLD + moved
        bound = transformer.bind(model, params)
        log_p_BLV = jax.nn.log_softmax(bound.logits(bound.final_norm(x_BLD)))
        own_BL = jnp.take_along_axis(log_p_BLV[:, :-1], tokens_BL[:, 1:, None], -1)[..., 0]
        divergence_BL = (jnp.exp(final_BLV) * (final_BLV - log_p_BLV)).sum(-1)
        agreement_BL = log_p_BLV.argmax(-1) == final_BLV.argmax(-1)
        return -own_BL.mean(1), agreement_BL.mean(1), divergence_BL.mean(1)

    return tuple(value.T for value in jax.lax.map(layer, (streams_NBLD, translators)))


def _pictures(data: dict) -> tuple[HeatMap, ...]:
    both = np.stack([data["divergence"], data["tuned_divergence"]], 1)
    caption = "nats from the final prediction: column 0 the logit lens, 1 the tuned lens"
    return (HeatMap("Divergence", caption, both, "layer", "lens", 0.0, None),)


def _table(data: dict) -> Table:
    names = [prefix + figure for figure in FIGURES for prefix in ("", "tuned_")]
    found = [(str(n), *(round(float(data[name][n]), 4) for name in names)) for n in range(len(data["loss"]))]
    return Table("Layers", "of the stream after a layer", ("layer", *(name.replace("_", " ") for name in names)), found)
