"""ROME: rank-one edits of a fact in the values of one memory (Meng et al. 2022).

For each request, in order: the key k* of its subject, the vector delta that the memory should write for it (optimise.py),
and the change of the values that writes delta and disturbs other keys least (values.py). Here k* is always the mean over the
prefixes. The published code uses the mean for the direction C^-1 k*, and the key of the prompt alone for its length: the
edit then writes delta times (C^-1 k* . k*) / (C^-1 k* . k_prompt), which is sometimes many times delta and breaks the model
(key="published").
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
from scipy import linalg

from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.editing import report
from xfresearch.editing.keys import RIDGE, TOKENS, covariance, keys_of, prefixes_of, ridged
from xfresearch.editing.optimise import DEFAULT, Settings, delta_for
from xfresearch.editing.report import Edit
from xfresearch.editing.requests import check_numbers, memory_of, prepared
from xfresearch.editing.texts import check_fit
from xfresearch.editing.values import factored, rome_change, values_of, with_change
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import stage

KEYS = ("mean", "published")


def rome(
    lm,
    requests: Sequence[Record | dict],
    memory: str = "",
    data: str = "",
    tokens: int = TOKENS,
    key: str = "mean",
    ridge: float = RIDGE,
    settings: Settings = DEFAULT,
    seed: int = 0,
    known: Sequence[Fact] | None = None,
    alone: bool = False,
    prompts: int = 0,
):
    """(edited model, report.Report) for requests with target_new, one after another.

    memory: such as 'blocks.3.feed_forward'; by default the one that the model's own trace finds (requests.py).
    data, tokens: the corpus and the tokens of C (keys.py). key: 'mean' or 'published', see above. ridge: added to the
    diagonal of C, relative to its mean. known, alone, prompts: as in
    report.Asked. Raises UserError for requests that cannot be
    made."""
    if key not in KEYS:
        raise UserError(f"key={key!r} is not allowed: it must be one of {', '.join(KEYS)}")
    check_numbers(prompts=prompts, tokens=tokens, ridge=ridge)
    requests, known = prepared(lm, requests, known)
    memory = memory_of(lm, requests, memory)
    prefixes = prefixes_of(lm, seed)
    check_fit(lm, requests, prefixes)
    factors = factored(ridged(covariance(lm, memory, data, tokens), ridge))
    edit = partial(_edited, memory=memory, factors=factors, prefixes=prefixes, key=key, settings=settings)
    about = {"key": key, "ridge": ridge, **settings._asdict()}
    return report.of(lm, requests, edit, "rome", about, report.Asked(known, alone, prompts))


def _edited(lm, requests, memory: str, factors: list, prefixes: list[str], key: str, settings: Settings):
    """The edited model, and the edits."""
    edited, edits = lm, []
    with stage("ROME", len(requests), "edits") as progress:
        for record in requests:
            keys_JHM = keys_of(edited, memory, record, prefixes)
            mean_HM = keys_JHM.mean(0)
            optimised = delta_for(edited, memory, [record], prefixes, settings)
            values = values_of(edited, memory)
            change = rome_change(values, factors, mean_HM, optimised.delta_D)
            if key == "published":
                change = change * _published(factors, mean_HM, keys_JHM[0])
            edited = with_change(edited, memory, change)
            norm = float(np.linalg.norm(change) / np.linalg.norm(values.values_GMV))
            edits.append(Edit(record, (memory,), (norm,), optimised.losses, optimised.probability))
            progress.update(1)
    return edited, edits


def _published(factors: list, mean_HM: np.ndarray, prompt_HM: np.ndarray) -> float:
    """The factor by which the published code's change is larger."""
    if len(mean_HM) > 1:
        raise UserError("key='published' is not allowed for slots of several heads: it must be mean")
    u_M = linalg.cho_solve(factors[0], mean_HM[0])
    return float((u_M @ mean_HM[0]) / (u_M @ prompt_HM[0]))
