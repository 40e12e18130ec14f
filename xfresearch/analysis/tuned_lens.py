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

from xfresearch.analysis.lens import FIGURES, by_depth
from xfresearch.analysis.passes import about
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Result, over_rows
from xfresearch.analysis.sequences import Sequences, batches, sequences, training_rows
from xfresearch.models.model_config import ModelConfig, predicts_next
from xfresearch.models.stack import end_formula, ends_with
from xfresearch.pages.figures import HeatMap, table_of
from xfresearch.runtime.progress import stage

ROWS = 32
BATCH = 8
STEPS = 300
RATE = 1e-3


def applies(model: ModelConfig) -> str:
    """Why the analysis does not apply to a model; '' if it does."""
    if reason := predicts_next(model):
        return reason
    if model.depth == 1:  # the figures are means over the layers before the last one, which is the model itself
        return "the model has one layer, and the lens is of the layers before the last one"
    return f"its head reads {end_formula(model)}, and a translator is of x alone" if ends_with(model) else ""


@analysis(applies, "predictions after each layer, through trained translators")
def tuned_lens(
    lm, data=None, count: int = ROWS, sequence_length: int = 0, steps: int = STEPS, training=None, source=None
) -> Result:
    """Trains the translators of the decoder for `steps` batches of `training`, and measures on `count` rows of `length`
    tokens of `data` (sequences.py).

    training: token ids [N, L], or Sequences; None for the train split of `data`, or of the model's run if `data` are given.
    .data: loss, agreement, divergence, tuned_loss, tuned_agreement, tuned_divergence [N], the same for each row (name_rows),
    and the translators: matrix [N, D, D], bias [N, D]. The intervals of .summary are over rows. Raises UserError for data
    that cannot be read."""
    rows = sequences(lm, data, count, sequence_length, source=source)
    trained = train(lm, training_rows(lm, training, data, rows, steps * BATCH), steps)
    per_row: dict[str, list] = {}
    for some, _ in batches(rows, BATCH):
        for name, translators in (("", None), ("tuned_", trained)):
            values = by_depth(lm.config, lm.params, translators, some)
            for figure in FIGURES:
                per_row.setdefault(name + figure, []).append(np.asarray(values[figure], np.float64))
    measured = {name: np.concatenate(parts)[: len(rows)] for name, parts in per_row.items()}
    early = {name: value[:, :-1] for name, value in measured.items()}
    found = over_rows(measured).data | {name: np.asarray(value) for name, value in trained.items()}
    both = np.stack([found["divergence"], found["tuned_divergence"]], 1)
    axes = "layer", "lens", 0.0, None, ("logit", "tuned"), ".3f"
    picture = HeatMap("Divergence", "nats from the final prediction", both, *axes)
    line = about(lm, rows, data)
    columns = {name.replace("_", " "): found[name] for figure in FIGURES for name in (figure, f"tuned_{figure}")}
    of_layers = table_of("Layers", "of the stream after a layer", "layer", range(lm.config.depth), columns)
    return Result("tuned_lens", line, lm.step, found, over_rows(early).summary, (picture,), (of_layers,))


def train(lm, rows: Sequences, steps: int) -> dict[str, jax.Array]:
    """The translators {matrix: [N, D, D], bias: [N, D]} after `steps` batches of the rows, which repeat."""
    depth, width = lm.config.depth, lm.config.width
    translators = {"matrix": jnp.zeros((depth, width, width)), "bias": jnp.zeros((depth, width))}
    optimizer = optax.adam(optax.linear_schedule(RATE, 0.0, steps))
    state = optimizer.init(translators)
    size = min(BATCH, len(rows))
    with stage("tuned lens", steps, "steps") as progress:
        for number in range(steps):
            chosen = np.arange(number * size, (number + 1) * size) % len(rows)
            translators, state = _step(lm.config, steps, lm.params, translators, state, rows.chosen(chosen))
            progress.update(1)
    return translators


@partial(jax.jit, static_argnums=(0, 1))
def _step(model: ModelConfig, steps: int, params: dict, translators: dict, state, rows: Sequences):
    optimizer = optax.adam(optax.linear_schedule(RATE, 0.0, steps))

    def loss(translators):
        return by_depth(model, params, translators, rows)["divergence"].mean(0).sum()

    updates, state = optimizer.update(jax.grad(loss)(translators), state)
    return optax.apply_updates(translators, updates), state
