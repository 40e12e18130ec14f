"""Pseudo-perplexity of a masked model (Salazar et al. 2020, Masked Language Model Scoring, eq. 1 and 2).

    PLL(W) = sum_t log p(w_t | W without w_t)        PPPL = exp(-sum of PLL / number of tokens)

Each token that is no special token is masked alone, so a sequence of n tokens takes n passes. It is no perplexity: the
probabilities do not multiply to that of a text, and models that predict next tokens have none.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xfresearch.data.objectives import Corrupted
from xfresearch.data.objectives.masked import Masked
from xfresearch.data.pipeline import spread
from xfresearch.evaluation.losses import SUMS, on_host, perplexity, summary
from xfresearch.evaluation.whole_rows import Rows
from xfresearch.runtime.errors import UserError

COUNT = 64  # sequences by default: each takes as many passes as it has tokens


def masked_sequences(data) -> tuple[Corrupted, Masked]:
    """The sequences of `data` and the objective that masks them. Raises UserError for a model that was not trained on masked
    tokens."""
    sequences = getattr(data, "sequences", None)  # a text has none
    objective = getattr(sequences, "objective", None)
    if not isinstance(sequences, Corrupted) or not isinstance(objective, Masked):
        raise UserError("--pseudo-perplexity is not allowed: the model was not trained with data.objective.kind='masked'")
    return sequences, objective


def masked_alone(row: dict[str, np.ndarray], objective: Masked) -> dict[str, np.ndarray]:
    """A sequence, arrays [1, L], once for each of its n tokens that may be predicted, with this token masked: [n, L]."""
    places = np.flatnonzero(objective.allowed(row)[0])
    passes = {name: np.repeat(values, len(places), 0) for name, values in {**row, "targets": row["tokens"]}.items()}
    each = np.arange(len(places))
    passes["tokens"][each, places], passes["weights"][:] = objective.mask, 0
    passes["weights"][each, places] = 1
    return passes


def pseudo_perplexity(
    scorer: Callable, params: dict[str, Any], data: Rows, batch_size: int, limit: int = COUNT, progress=lambda rows: None
) -> dict[str, Any]:
    """`pseudo_perplexity`, with the `pseudo_loss` in nats, its standard error over sequences, and the number of tokens and
    of sequences, `limit` of them spread over those of `data`. `scorer` is from losses.make_scorer. Raises UserError for a
    model that was not trained on masked tokens."""
    sequences, objective = masked_sequences(data)
    of_data = spread(len(sequences), len(data.rows))
    losses = []
    for number in of_data[spread(len(of_data), limit)]:
        row = sequences.split.read([number])
        losses.append(_losses(scorer, params, masked_alone(row, objective), batch_size))
        progress(1)
    sums = [(math.fsum(loss_n), 0.0, len(loss_n)) for loss_n in losses]
    results = summary(dict(zip(SUMS, np.array(sums).T, strict=True)))
    return {
        "pseudo_perplexity": perplexity(results["loss"]),
        "pseudo_loss": results["loss"],
        "pseudo_standard_error": results["standard_error"],
        "pseudo_tokens": results["tokens"],
        "pseudo_sequences": len(losses),
    }


def _losses(scorer: Callable, params: dict[str, Any], passes: dict[str, np.ndarray], size: int) -> np.ndarray:
    """The loss of the predicted token of each pass [n], in batches of one shape: the last one repeats a pass."""
    total, parts = len(passes["tokens"]), [np.zeros(0)]
    for first in range(0, total, size):
        chosen = np.minimum(np.arange(first, first + size), total - 1)
        batch = {name: values[chosen] for name, values in passes.items()}
        nll_BL, _ = on_host(dict(enumerate(scorer(params, batch)))).values()
        parts.append(nll_BL.sum(-1)[: total - first])
    return np.concatenate(parts)
