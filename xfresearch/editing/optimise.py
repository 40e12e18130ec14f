"""The vector that a memory should write for a subject, so that the model predicts the new object (Meng et al. 2022, eq. 4).

A vector delta is added to the output of the memory's sublayer (the tap `raw`) at the last token of the subject; for MEMIT,
to the residual stream after it. It minimises

    mean_j -log P(new object | prefix_j, prompt)  +  a KL(P_edited || P) after "<subject> is a"  +  b |delta| / |v|^2

with Adam. v is the sublayer's output there without a prefix. The norm of delta is at most c |v|. Adam stops when the first
two terms are small. The constants are those of the published code, whose third term has the norm, not its square. But the
published learning rate suits GPT-2 XL alone: here it is relative to the root mean square of v, and there are more steps. The
published code differs from the paper and from this file in two more points: it reads the second term at the subject, not
after the last word, and it stops when all three terms are small.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xfresearch.analysis.coefficients import written_by
from xfresearch.analysis.prompts import read
from xfresearch.analysis.sequences import Sequences, passed
from xfresearch.analysis.tap_vectors import stack_of
from xfresearch.data.records import Record
from xfresearch.editing.texts import essence_of, fitting, prompts_after
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.taps import Patch, captured, request


class Settings(NamedTuple):
    """The constants of the loss and of Adam."""

    steps: int = 30
    rate: float = 0.5
    unit: Literal["value", "one"] = "value"  # of the rate: the root mean square of v, or 1 as in the published code
    essence: float = 0.0625  # a
    decay: float = 0.5  # b
    largest: float = 4.0  # c
    enough: float = 0.05  # it stops at this loss


DEFAULT = Settings()
PUBLISHED = Settings(steps=20, unit="one")


class Optimised(NamedTuple):
    delta_D: np.ndarray
    losses: list[float]
    probability: float  # of the new objects with delta, over all their tokens, mean over the prompts


class _Texts(NamedTuple):
    """Prompts with the new object, then the essence prompt."""

    rows: Sequences
    subject_B: np.ndarray  # position of the last token of the subject
    target_BL: np.ndarray  # bool: the tokens of the new object
    last: int  # the last token that is read of the essence prompt


def delta_for(
    lm, memory: str, records: Sequence[Record], prefixes: list[str], settings: Settings = DEFAULT, site: str = "raw"
) -> Optimised:
    """delta for the new objects of records about one subject, at a site of the sublayer that has the memory. Raises
    UserError for an object that the tokenizer cannot make, or a text beyond the model's table of positions."""
    texts = _texts(lm, records, prefixes)
    tap = f"{written_by(memory)}.{site}"
    value_D, before_V = _before(lm.config, tap, lm.params, texts)
    unit = float(jnp.sqrt((value_D**2).mean())) if settings.unit == "value" else 1.0
    optimizer = optax.adam(settings.rate * unit)
    delta_D = jnp.zeros_like(value_D)
    state = optimizer.init(delta_D)
    losses, weights, likely = [], (settings.essence, settings.decay), 0.0
    for step in range(settings.steps):
        arguments = (lm.config, tap, lm.params, texts, weights, value_D, before_V, delta_D)
        (loss, (nll, near, likely)), slope_D = _loss_and_slope(*arguments)
        losses.append(float(loss))
        if float(nll + near) < settings.enough or step == settings.steps - 1:
            break
        change_D, state = optimizer.update(slope_D, state)
        delta_D = _clipped(delta_D + change_D, settings.largest * jnp.linalg.norm(value_D))
    return Optimised(np.asarray(delta_D, np.float64), losses, float(likely))


def _texts(lm, records: Sequence[Record], prefixes: list[str]) -> _Texts:
    essence = essence_of(lm, records[0])
    prompts = [*(prompt for record in records for prompt in prompts_after(lm, record, prefixes)), essence]
    rows, target_BL = fitting(lm, prompts)
    subject_B = np.array([prompt.last for prompt in prompts])
    return _Texts(rows, subject_B, target_BL, int(read(lm, [essence])[1][0]))


def _pass(model: ModelConfig, tap: str, params: dict, texts: _Texts, delta_D):
    """The bound model and its output with delta at the last token of each subject."""
    here_BL = jnp.arange(stack_of(texts.rows, tap).tokens_NL.shape[1]) == texts.subject_B[:, None]
    patch = Patch(jnp.add, (delta_D,), here_BL)
    return passed(model, params, texts.rows, request(model, [tap], {tap: patch}))


@partial(jax.jit, static_argnums=(0, 1))
def _before(model: ModelConfig, tap: str, params: dict, texts: _Texts):
    """v [D], of the prompt without a prefix, and log P [V] after the essence prompt."""
    lm, out = _pass(model, tap, params, texts, jnp.zeros(()))
    value_BLD = captured(model, out.captures, [tap])[tap]
    logits_V = lm.logits(out.hidden_BLD[-1:, texts.last][:, None])[0, 0]
    return value_BLD[0, texts.subject_B[0]], jax.nn.log_softmax(logits_V)


@partial(jax.jit, static_argnums=(0, 1))
def _loss_and_slope(model, tap: str, params: dict, texts: _Texts, weights, value_D, before_V, delta_D):
    """(loss, (its first term, its second term, the probability of the targets)) and the gradient for delta. weights: a and
    b."""

    def loss(delta_D):
        lm, out = _pass(model, tap, params, texts, delta_D)
        log_p_BLV = jax.nn.log_softmax(lm.logits(out.hidden_BLD[:-1]))
        own_BL = jnp.take_along_axis(log_p_BLV[:, :-1], texts.rows.tokens_NL[:-1, 1:, None], -1)[..., 0]
        target_BL = texts.target_BL[:-1, 1:]
        target_B = jnp.where(target_BL, own_BL, 0.0).sum(1)
        nll = -(target_B / target_BL.sum(1)).mean()
        after_V = jax.nn.log_softmax(lm.logits(out.hidden_BLD[-1:, texts.last][:, None])[0, 0])
        near = weights[0] * (jnp.exp(after_V) * (after_V - before_V)).sum()
        # The gradient of a norm at 0 is not a number; the first step starts there.
        norm = jnp.sqrt(jnp.maximum((delta_D**2).sum(), jnp.finfo(delta_D.dtype).tiny))
        return nll + near + weights[1] * norm / (value_D**2).sum(), (nll, near, jnp.exp(target_B).mean())

    return jax.value_and_grad(loss, has_aux=True)(delta_D)


def _clipped(delta_D, largest):
    norm = jnp.linalg.norm(delta_D)
    return jnp.where(norm > largest, delta_D * largest / norm, delta_D)
