"""Probes: further measures of every run of a study. Copying, recall and induction separate arms whose losses are equal: more
is better.

    copying     nats saved on the second half of random tokens that are repeated once (Olsson et al. 2022), per token
    recall      nats saved on the value of a key that has occurred before, among PAIRS pairs of random keys and values in
                random order (associative recall, Arora et al. 2023)
    induction   largest induction score of any head (analysis/attention.py); NaN without softmax attention over tokens
    sink        mean weight of the heads on the first token of held-out text; NaN likewise
    ANALYSIS.FIGURE  a figure of the summary of an analysis (docs/anatomy.md), such as 'memories.agreement'; NaN for a model
                to which the analysis does not apply, or which has no such figure, such as one without memory slots
    hardest     accuracy of the held-out answers of the highest difficulty, of data with labels (docs/playground.md)
    accepted    share of generated answers that the data set accepts; NaN for one whose answers have one right form
    divergence  nats per label above the exact law of the data: less is better; NaN for a data set without a known law
    bits_per_parameter  about the people of capo; NaN for other data sets
    exact_match  share of the held-out pairs (docs/objectives.md) whose target greedy decoding gives
    source      nats per target token that a model loses if its encoder reads the source of another pair
    tasks.NAME  the first metric of a task of lm_eval (docs/evaluation.md), which may be one where less is better

The tokens of copying and recall are the same for all runs with one vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace

import numpy as np

from xfresearch.models.model_config import predicts_next
from xfresearch.runtime.errors import NothingMeasured, UserError, nearest, require

ROWS, PAIRS = 64, 8
LONGEST = 64  # tokens that are copied


def copying(lm) -> float:
    if predicts_next(lm.config):
        return np.nan
    half = min(LONGEST, lm.run.sequence_length // 2)
    once_BL = np.random.default_rng(0).integers(lm.config.vocab_size, size=(ROWS, half))
    loss_BL = np.asarray(lm.loss(np.concatenate([once_BL, once_BL], 1)), np.float64)
    return float(loss_BL[:, : half - 1].mean() - loss_BL[:, half:].mean())  # not the first token of the copy


def recall(lm) -> float:
    if predicts_next(lm.config):
        return np.nan
    pairs = min(PAIRS, lm.run.sequence_length // 4, lm.config.vocab_size // 2)
    tokens_BL = pairs_twice(np.random.default_rng(0), ROWS, pairs, lm.config.vocab_size)
    loss_BL = np.asarray(lm.loss(tokens_BL), np.float64)[:, ::2]  # of the values: position 2 i predicts that of pair i
    return float(loss_BL[:, :pairs].mean() - loss_BL[:, pairs:].mean())


def pairs_twice(rng, rows: int, pairs: int, vocabulary: int) -> np.ndarray:
    """[rows, 4 pairs]: key, value, key, value, ..., then the same pairs in another order. No token is in two pairs."""
    sequences = []
    for _ in range(rows):
        first_P2 = rng.permutation(vocabulary)[: 2 * pairs].reshape(pairs, 2)
        sequences.append(np.concatenate([first_P2, rng.permutation(first_P2)]).ravel())
    return np.stack(sequences)


def exact_match(lm) -> float:
    """The share of held-out targets that greedy decoding gives. It gives a target if each of its tokens is the likeliest
    after those before it, so one pass tells."""
    from xfresearch.evaluation import losses

    right = pairs = 0
    for batch in _held_out(lm):
        correct_BL = _scorer(lm.config)(lm.params, batch)[1]
        right_BP, pairs_B = losses.right_answers(correct_BL, batch["segments"])
        right, pairs = right + int(right_BP.sum()), pairs + int(pairs_B.sum())
    return right / pairs


def source(lm) -> float:
    """Nats per token of held-out targets that a model loses if it reads the sources of the row before. Of a row with
    several pairs, a target reads the source with its number; it is left out if the other row has none."""
    lost, tokens = 0.0, 0
    for batch in _held_out(lm):
        others = {name: np.roll(batch[name], 1, 0) for name in ("source", "source_segments", "source_positions")}
        shared_BL = (batch["segments"][:, :, None] == others["source_segments"][:, None]).any(-1)
        batch["weights"] = batch["weights"] * shared_BL
        own_BL, other_BL = (np.asarray(_scorer(lm.config)(lm.params, each)[0]) for each in (batch, batch | others))
        lost += float((other_BL - own_BL).sum(dtype=np.float64))
        tokens += int(batch["weights"].sum())
    return lost / tokens if tokens else np.nan


def _held_out(lm) -> Iterator[dict[str, np.ndarray]]:
    """Batches of `evaluation.sequences` held-out sequences, as for the loss curve."""
    from xfresearch.data.pipeline import evaluation_batches
    from xfresearch.evaluation import losses, whole_rows

    data = whole_rows.read_rows(lm, "the run", limit=lm.run.evaluation.sequences)
    return evaluation_batches(data.sequences, losses.batch_size(lm.run, 0), len(data.rows))


@lru_cache(maxsize=2)  # as of training: a study goes from cell to cell
def _scorer(model) -> Callable:
    """The scorer of a model config: one for all runs of a cell, so that they share its compiled program."""
    from xfresearch.evaluation.losses import make_scorer

    return make_scorer(model)


PROBES: dict[str, Callable] = {"copying": copying, "recall": recall, "exact_match": exact_match, "source": source}
# Figures of all heads (analysis/attention.py), and how they become one.
OF_HEADS: dict[str, tuple[str, Callable]] = {"induction": ("induction", np.nanmax), "sink": ("first", np.nanmean)}
OF_LABELS = ("hardest", "accepted", "divergence", "bits_per_parameter")


def _of_labels(lm, names: Sequence[str]) -> dict[str, float]:
    """Figures of the held-out labels, of as many sequences as the points of the curve."""
    from xfresearch.evaluation import answers, held_out, whole_rows

    data = whole_rows.read_rows(lm, "the run", limit=lm.run.evaluation.sequences)
    measured = whole_rows.metrics(held_out.Scorer(lm, data, 0)(lm.params, "answers"))
    measured["hardest"] = [*measured["by_difficulty"].values()][-1]["accuracy"]
    measured |= answers.figures(lm.config, lm.params, data, measured) if {*names} - {"hardest"} else {}
    return {name: measured.get(name, np.nan) for name in names}


def _of_heads(lm, names: Sequence[str]) -> dict[str, float]:
    from xfresearch.analysis.attention import applies, attention

    if not names or applies(lm.config):
        return dict.fromkeys(names, np.nan)
    data = attention(lm, count=8).data
    return {name: float(over_heads(data[figure])) for name, (figure, over_heads) in OF_HEADS.items() if name in names}


def check(names: Sequence[str], task_data: str = "") -> None:
    """Raises UserError for a probe that does not exist."""
    from xfresearch.analysis.registry import ANALYSES

    for name in names:
        source, dot, figure = name.partition(".")
        if dot and figure and source == "tasks":
            require("," not in figure, "probes", name, "tasks.NAME, of one task")
            from xfresearch.harness import tasks

            tasks.split_names(figure, task_data)
            tasks.check_installed()
        elif dot:
            corpora = [each for each, analysis in ANALYSES.items() if not analysis.prompts]
            require(bool(figure) and source in corpora, "probes", name, f"ANALYSIS.FIGURE, of one of {', '.join(corpora)}")
        else:
            allowed = f"one of {', '.join([*PROBES, *OF_HEADS, *OF_LABELS])}, ANALYSIS.FIGURE or tasks.NAME"
            require(name in {*PROBES, *OF_HEADS, *OF_LABELS}, "probes", name, allowed)


def measure(lm, names: Sequence[str], folder="", task_data: str = "") -> dict[str, float]:
    """{name: value} of a language model, whose run is in `folder`."""
    figures = {name: PROBES[name](lm) for name in names if name in PROBES}
    figures |= _of_heads(lm, [name for name in names if name in OF_HEADS])
    if of_labels := [name for name in names if name in OF_LABELS]:
        figures |= _of_labels(lm, of_labels)
    of_tasks = [name.partition(".")[2] for name in names if name.startswith("tasks.")]
    if of_tasks:
        figures |= _of_tasks(lm, of_tasks, folder, task_data)
    rest = [name for name in names if name not in figures]
    for analysis in dict.fromkeys(name.partition(".")[0] for name in rest):
        figures |= _of_analysis(lm, analysis, [name for name in rest if name.startswith(f"{analysis}.")])
    return {name: figures[name] for name in names}


def _of_analysis(lm, analysis: str, names: Sequence[str]) -> dict[str, float]:
    """Figures of one analysis, which runs once."""
    summary = _summary(lm, analysis)
    return {name: float(summary.get(name.partition(".")[2], (np.nan,))[0]) for name in names}


def _summary(lm, analysis: str) -> dict[str, tuple[float, float]]:
    """The summary of an analysis; {} for a model that has nothing which it measures."""
    from xfresearch.analysis.registry import ANALYSES

    if ANALYSES[analysis].applies(lm.config):
        return {}
    try:
        return ANALYSES[analysis].run(lm).summary
    except NothingMeasured:
        return {}


def check_figures(names: Sequence[str], models: Iterable) -> None:
    """Raises UserError for a figure of an analysis that no model has. models: LanguageModels of the arms with new
    parameters. An analysis that measures nothing in any of them, because they know nothing yet, is not checked."""
    wanted = [name for name in names if "." in name and not name.startswith("tasks.")]
    figures: dict[str, dict] = {name.partition(".")[0]: {} for name in wanted}
    if not figures:
        return
    for lm in models:
        for analysis, known in figures.items():
            known |= _summary(lm, analysis)
    for name in wanted:
        analysis, _, figure = name.partition(".")
        allowed = f"{analysis}. and one of {', '.join(figures[analysis])}{nearest(figure, list(figures[analysis]))}"
        require(not figures[analysis] or figure in figures[analysis], "probes", name, allowed)


def _of_tasks(lm, names: Sequence[str], folder, task_data: str) -> dict[str, float]:
    """The first metric of each task."""
    from xfresearch.harness.measuring import measure as run_tasks

    settings = {"fewshot": None, "limit": 0, "sequence_length": 0, "batch_size": 0}
    options = SimpleNamespace(tasks=",".join(names), task_data=task_data, **settings)
    of_task = run_tasks(str(folder), lm, None, options)["tasks"]
    if missing := [name for name in names if name not in of_task]:
        raise UserError(f"probes: tasks.{missing[0]} is a group of tasks: name the tasks in it ({', '.join(of_task)})")
    return {f"tasks.{name}": next(iter(of_task[name]["metrics"].values()))["value"] for name in names}
