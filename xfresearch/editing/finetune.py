"""The baselines of ROME: fine-tuning the values of one memory on the requests, without and with a bound on each parameter's
change (Meng et al. 2022, section 3.4; Zhu et al. 2020).

The loss is the mean of -log P(new object | prompt) over the requests, all at once. Adam stops when it is small. With the
bound, every step ends with a projection: no parameter differs from its start by more than `largest`.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xfresearch.analysis.prompts import prompt_of
from xfresearch.analysis.sequences import passed
from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.editing import report
from xfresearch.editing.report import Edit
from xfresearch.editing.requests import check_numbers, memory_of, prepared
from xfresearch.editing.texts import fitting
from xfresearch.editing.values import leaf_of, name_of, path_of, with_leaf
from xfresearch.kernels.cross_entropy import token_nll
from xfresearch.loading.edits import with_leaf as with_parameter
from xfresearch.models.model_config import ModelConfig
from xfresearch.runtime.progress import stage

STEPS, RATE = 25, 5e-4  # of the published code
LARGEST = 5e-3  # chosen on the fact models (root mean square of the values: 0.09); 5e-4 for GPT-2 XL
ENOUGH = 1e-2  # it stops at this loss


def finetune(
    lm,
    requests: Sequence[Record | dict],
    memory: str = "",
    rate: float = RATE,
    steps: int = STEPS,
    known: Sequence[Fact] | None = None,
    alone: bool = False,
    prompts: int = 0,
):
    """(edited model, report.Report) for requests with target_new, all at once. memory: such as
    'blocks.3.feed_forward'; by default the one that the model's own trace finds. rate, steps: of Adam. known, alone,
    prompts: as in report.Asked. Raises UserError for requests that cannot be made."""
    settings = {"rate": rate, "steps": steps}
    return _report(lm, requests, memory, "finetune", settings, np.inf, report.Asked(known, alone, prompts))


def constrained_finetune(
    lm,
    requests: Sequence[Record | dict],
    memory: str = "",
    largest: float = LARGEST,
    rate: float = RATE,
    steps: int = STEPS,
    known: Sequence[Fact] | None = None,
    alone: bool = False,
    prompts: int = 0,
):
    """The same, with a bound. largest: the largest change of a parameter."""
    check_numbers(largest=largest)
    settings = {"largest": largest, "rate": rate, "steps": steps}
    return _report(lm, requests, memory, "constrained_finetune", settings, largest, report.Asked(known, alone, prompts))


def _report(lm, requests, memory: str, method: str, settings: dict, largest: float, asked: report.Asked):
    check_numbers(prompts=asked.prompts, rate=settings["rate"], steps=settings["steps"])
    requests, known = prepared(lm, requests, asked.known)
    edit = partial(_tuned, memory=memory_of(lm, requests, memory), method=method, settings=settings, largest=largest)
    return report.of(lm, requests, edit, method, settings, asked._replace(known=known))


def _tuned(lm, requests, memory: str, method: str, settings: dict, largest: float):
    """The edited model, and the edits."""
    rows, is_new_NL = fitting(lm, [prompt_of(lm, record, record.target_new) for record in requests])
    path = path_of(lm, memory)
    start = leaf_of(lm, memory, path)
    optimizer = optax.adam(settings["rate"])
    leaf, state, losses = start, optimizer.init(start), []
    with stage(method, settings["steps"], "steps") as progress:
        for step in range(settings["steps"] + 1):
            loss, slope, log_p_N = _loss_and_slope(lm.config, memory, path, lm.params, leaf, rows, is_new_NL)
            losses.append(float(loss))
            if losses[-1] < ENOUGH or step == settings["steps"]:
                break
            change, state = optimizer.update(slope, state)
            leaf = jnp.clip(leaf + change, start - largest, start + largest)
            progress.update(1)
    edited = with_leaf(lm, memory, path, leaf)
    norm = float(jnp.linalg.norm((leaf - start).ravel()) / jnp.linalg.norm(start.ravel()))
    pairs = zip(requests, np.exp(log_p_N), strict=True)
    return edited, [Edit(record, (memory,), (norm,), losses, float(p)) for record, p in pairs]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _loss_and_slope(model: ModelConfig, memory: str, path: tuple[str, ...], params: dict, leaf, rows, is_new_NL):
    """The loss, its gradient for the parameter, and the log probability of each new object [N]."""

    def loss(leaf):
        changed = with_parameter(model, params, name_of(memory, path), leaf)
        lm, out = passed(model, changed, rows)
        nll_NL = token_nll(out.hidden_BLD[:, :-1], lm.logit_head(), rows.tokens_NL[:, 1:])[0] * is_new_NL[:, 1:]
        return (nll_NL.sum(1) / is_new_NL.sum(1)).mean(), -nll_NL.sum(1)

    (value, log_p_N), slope = jax.value_and_grad(loss, has_aux=True)(leaf)
    return value, slope, log_p_N
