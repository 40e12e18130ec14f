"""What else is measured on every run of a study. Copying, recall and induction separate arms whose losses are equal: more is
better.

    copying     nats saved on the second half of random tokens that are repeated once (Olsson et al. 2022), per token
    recall      nats saved on the value of a key that has occurred before, among PAIRS pairs of random keys and values in
                random order (associative recall, Arora et al. 2023)
    induction   largest induction score of any head (analysis/attention.py); NaN without softmax attention over tokens
    sink        mean weight of the heads on the first token of held-out text; NaN likewise
    ANALYSIS.FIGURE  a figure of the summary of an analysis (docs/anatomy.md), such as 'memories.agreement'; NaN for a model
                to which the analysis does not apply
    tasks.NAME  the first metric of a task of lm_eval (docs/evaluation.md), which may be one where less is better

The tokens of copying and recall are the same for all runs with one vocabulary.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from xfresearch.errors import UserError, require

ROWS, PAIRS = 64, 8
LONGEST = 64  # tokens that are copied


def copying(lm) -> float:
    half = min(LONGEST, lm.run.sequence_length // 2)
    once_BL = np.random.default_rng(0).integers(lm.config.vocab_size, size=(ROWS, half))
    loss_BL = np.asarray(lm.loss(np.concatenate([once_BL, once_BL], 1)), np.float64)
    return float(loss_BL[:, : half - 1].mean() - loss_BL[:, half:].mean())  # not the first token of the copy


def recall(lm) -> float:
    pairs = min(PAIRS, lm.run.sequence_length // 4, lm.config.vocab_size // 2)
    tokens_BL = pairs_twice(np.random.default_rng(0), ROWS, pairs, lm.config.vocab_size)
    loss_BL = np.asarray(lm.loss(tokens_BL), np.float64)[:, ::2]  # of the values: position 2 i predicts that of pair i
    return float(loss_BL[:, :pairs].mean() - loss_BL[:, pairs:].mean())


def pairs_twice(rng, rows: int, pairs: int, vocabulary: int) -> np.ndarray:
    """[rows, 4 pairs]: key, value, key, value, ..., then the same pairs in another order. No token is in two pairs."""
    found = []
    for _ in range(rows):
        first_P2 = rng.permutation(vocabulary)[: 2 * pairs].reshape(pairs, 2)
        found.append(np.concatenate([first_P2, rng.permutation(first_P2)]).ravel())
    return np.stack(found)


def induction(lm) -> float:
    return _of_attention(lm, "induction", np.nanmax)


def sink(lm) -> float:
    return _of_attention(lm, "first", np.nanmean)


def _of_attention(lm, name: str, over_heads: Callable) -> float:
    from xfresearch.analysis.attention import applies, attention

    return np.nan if applies(lm.config) else float(over_heads(attention(lm, count=8).data[name]))


PROBES: dict[str, Callable] = {"copying": copying, "recall": recall, "induction": induction, "sink": sink}


def check(names: Sequence[str], task_data: str = "") -> None:
    """Raises UserError for a probe that does not exist."""
    from xfresearch.analysis.registry import ANALYSES

    for name in names:
        source, dot, figure = name.partition(".")
        if dot and figure and source == "tasks":
            from xfresearch.harness import tasks

            tasks.split_names(figure, task_data)
            tasks.check_installed()
        elif dot:
            corpora = [each for each, found in ANALYSES.items() if not found.prompts]
            require(figure and source in corpora, "probes", name, f"ANALYSIS.FIGURE, of one of {', '.join(corpora)}")
        else:
            require(name in PROBES, "probes", name, f"one of {', '.join(PROBES)}, ANALYSIS.FIGURE or tasks.NAME")


def measure(lm, names: Sequence[str], folder="", task_data: str = "") -> dict[str, float]:
    """{name: value} of a language model, whose run is in `folder`."""
    found = {name: PROBES[name](lm) for name in names if name in PROBES}
    of_tasks = [name.partition(".")[2] for name in names if name.startswith("tasks.")]
    if of_tasks:
        found |= _of_tasks(lm, of_tasks, folder, task_data)
    rest = [name for name in names if name not in found]
    for analysis in dict.fromkeys(name.partition(".")[0] for name in rest):
        found |= _of_analysis(lm, analysis, [name for name in rest if name.startswith(f"{analysis}.")])
    return {name: found[name] for name in names}


def _of_analysis(lm, analysis: str, names: Sequence[str]) -> dict[str, float]:
    """Figures of one analysis, which runs once. Raises UserError for a figure that its summary does not have."""
    from xfresearch.analysis.registry import ANALYSES

    if ANALYSES[analysis].applies(lm.config):
        return dict.fromkeys(names, np.nan)
    summary = ANALYSES[analysis].run(lm).summary
    for name in names:
        require(name.partition(".")[2] in summary, "probes", name, f"{analysis}. and one of {', '.join(summary)}")
    return {name: float(summary[name.partition(".")[2]][0]) for name in names}


def _of_tasks(lm, names: Sequence[str], folder, task_data: str) -> dict[str, float]:
    """The first metric of each task."""
    from xfresearch.harness.measuring import measure as run_tasks

    settings = {"fewshot": None, "limit": 0, "sequence_length": 0, "batch_size": 0}
    options = SimpleNamespace(tasks=",".join(names), task_data=task_data, **settings)
    found = run_tasks(str(folder), lm, None, options)["tasks"]
    if missing := [name for name in names if name not in found]:
        raise UserError(f"probes: tasks.{missing[0]} is a group of tasks: name the tasks in it ({', '.join(found)})")
    return {f"tasks.{name}": next(iter(found[name]["metrics"].values()))["value"] for name in names}
