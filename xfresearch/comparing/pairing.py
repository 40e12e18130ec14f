"""Paired comparison of two models on the same items: it tests the differences per item, not two separate error bars.

If values are 0 or 1, the test is McNemar's exact test: it compares the first model's share of the items that only one
model answers correctly with one half. The interval is that of Agresti and Min (2005), which adds half an item to each
of the four outcomes. Without that, the interval is far too narrow if the models differ on few items, and has width 0 if
they differ on none. For other values, test and interval are Student's for the mean difference. Several tasks are
several tests, so Holm's method corrects p over the tasks on which a metric is compared.
"""

import math
from collections.abc import Sequence

from xfresearch.statistics import summary

CONFIDENCE = 0.95


def pair(first: Sequence[float], second: Sequence[float]) -> dict:
    """The paired comparison of two models' values on the same items. Differences are first minus second."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    n = len(differences)
    mean, deviation = summary(differences)
    error = deviation / math.sqrt(n)
    wins = sum(d > 0 for d in differences)
    losses = sum(d < 0 for d in differences)
    binary = all(value in (0, 1) for value in (*first, *second))
    return {
        "items": n,
        "first": math.fsum(first) / n,
        "second": math.fsum(second) / n,
        "difference": mean,
        "standard_error": error,
        "interval": agresti_min(wins, losses, n) if binary else student_interval(mean, error, n),
        "first_higher": wins,
        "second_higher": losses,
        "test": "McNemar, exact" if binary else "Student, paired",
        "p": mcnemar(wins, losses) if binary else student(mean, error, n),
    }


def mcnemar(wins: int, losses: int) -> float:
    """The two-sided p: the binomial probability of a split at least as uneven of the items that only one model answers
    correctly."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def agresti_min(wins: int, losses: int, n: int) -> list[float]:
    """The interval of the difference of two proportions of the same n items. Only the first model answers `wins` of
    them correctly, only the second `losses` of them."""
    from scipy.stats import norm

    wins += 0.5
    losses += 0.5
    n += 2
    center = (wins - losses) / n
    margin = float(norm.ppf((1 + CONFIDENCE) / 2)) * math.sqrt(wins + losses - (wins - losses) ** 2 / n) / n
    return [max(center - margin, -1.0), min(center + margin, 1.0)]


def student_interval(mean: float, error: float, n: int) -> list[float]:
    from scipy.stats import t

    margin = error * float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) if n > 1 else math.nan
    return [mean - margin, mean + margin]


def student(mean: float, error: float, n: int) -> float:
    from scipy.stats import t

    if not error:  # all differences are equal
        return 0.0 if mean else 1.0
    return float(2 * t.sf(abs(mean) / error, n - 1)) if n > 1 else math.nan


def holm(probabilities: Sequence[float]) -> list[float]:
    """p of several tests, corrected by Holm's method: a corrected p bounds the chance that any test without a true
    difference has a p as small. NaN (a task with one item) is not a test and stays NaN."""
    corrected = list(probabilities)
    largest = 0.0
    tests = [i for i, p in enumerate(probabilities) if not math.isnan(p)]
    for rank, i in enumerate(sorted(tests, key=lambda i: probabilities[i])):
        largest = max(largest, min(1.0, probabilities[i] * (len(tests) - rank)))
        corrected[i] = largest
    return corrected


def sentence(first: str, second: str, task: str, metric: str, found: dict) -> str:
    """The difference and its interval in words, in percentage points for proportions. p is the corrected p if there is
    one."""
    low, high = found["interval"]
    p = found.get("p_holm", found["p"])
    unit, scale, digits = ("points", 100, 1) if found["test"].startswith("McNemar") else (f"of {metric}", 1, 4)
    second_is_ahead = found["difference"] > 0 if found.get("lower_is_better") else found["difference"] < 0
    ahead, behind = (second, first) if second_is_ahead else (first, second)
    if found["difference"] < 0:
        low, high = -high, -low
    size = f"{scale * abs(found['difference']):.{digits}f} {unit}"
    interval = f"{scale * low:.{digits}f} to {scale * high:.{digits}f}"
    about = f"(95 % interval {interval}, {found['items']:,} items, p {p:.2g})"
    if not found["first_higher"] + found["second_higher"]:
        return f"{first} and {second} do not differ on any of {found['items']:,} items of {task}"
    if not found["difference"]:
        return f"{first} and {second} are equal on {task} {about}"
    if low > 0 and p < 1 - CONFIDENCE:
        return f"{ahead} is {size} better than {behind} on {task} {about}"
    return f"{ahead} is {size} ahead of {behind} on {task}, which may be chance {about}"
