"""Whether two models differ on the same items: the difference of each item's two figures, not two separate error bars.

Where figures are 0 or 1 the test is McNemar's, exact: of the items that one model gets and the other does not, how many
are the first one's, if either were as likely. The interval is Agresti and Min's (2005): half an item is added to each of the
four outcomes, without which it is far too narrow where models differ on few items, and nothing where they differ on none.
Otherwise test and interval are Student's of the mean difference. Several tasks are several tests: p is corrected by Holm's
method over the tasks that a metric is compared on.
"""

import math
from collections.abc import Sequence

from xfresearch.statistics import summary

CONFIDENCE = 0.95


def pair(first: Sequence[float], second: Sequence[float]) -> dict:
    """Figures of the paired comparison of two models' values on the same items, differences being first minus second."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    n = len(differences)
    mean, spread = summary(differences)
    error = spread / math.sqrt(n)
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    counted = all(value in (0, 1) for value in (*first, *second))
    return {
        "items": n,
        "first": math.fsum(first) / n,
        "second": math.fsum(second) / n,
        "difference": mean,
        "standard_error": error,
        "interval": agresti_min(wins, losses, n) if counted else student_interval(mean, error, n),
        "first_higher": wins,
        "second_higher": losses,
        "test": "McNemar, exact" if counted else "Student, paired",
        "p": mcnemar(wins, losses) if counted else student(mean, error, n),
    }


def mcnemar(wins: int, losses: int) -> float:
    """The two-sided binomial probability of a split at least as uneven, of items that only one of two models gets."""
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def agresti_min(wins: int, losses: int, n: int) -> list[float]:
    """Of the difference of two shares of the same n items, of which `wins` and `losses` are one model's only."""
    from scipy.stats import norm

    wins, losses, n = wins + 0.5, losses + 0.5, n + 2
    middle = (wins - losses) / n
    margin = float(norm.ppf((1 + CONFIDENCE) / 2)) * math.sqrt(wins + losses - (wins - losses) ** 2 / n) / n
    return [max(middle - margin, -1.0), min(middle + margin, 1.0)]


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
    """Each probability corrected for there being several: the chance that any test so small is one of no difference.
    NaN, of a task of one item, is no test and stays."""
    corrected, largest = list(probabilities), 0.0
    tests = [i for i, p in enumerate(probabilities) if not math.isnan(p)]
    for rank, i in enumerate(sorted(tests, key=lambda i: probabilities[i])):
        largest = max(largest, min(1.0, probabilities[i] * (len(tests) - rank)))
        corrected[i] = largest
    return corrected


def sentence(first: str, second: str, task: str, metric: str, found: dict) -> str:
    """The difference and its interval in words; shares are said in points of a hundred. p is the corrected one, if known."""
    (low, high), p = found["interval"], found.get("p_holm", found["p"])
    unit, scale, digits = ("points", 100, 1) if found["test"].startswith("McNemar") else (f"of {metric}", 1, 4)
    behind_first = found["difference"] > 0 if found.get("lower_is_better") else found["difference"] < 0
    ahead, behind = (second, first) if behind_first else (first, second)
    if found["difference"] < 0:
        low, high = -high, -low
    size = f"{scale * abs(found['difference']):.{digits}f} {unit}"
    about = (
        f"(95 % interval {scale * low:.{digits}f} to {scale * high:.{digits}f}, {found['items']:,} items, p {p:.2g})"
    )
    if not found["first_higher"] + found["second_higher"]:
        return f"{first} and {second} do not differ on any of {found['items']:,} items of {task}"
    if not found["difference"]:
        return f"{first} and {second} are equal on {task} {about}"
    if low > 0 and p < 1 - CONFIDENCE:
        return f"{ahead} is {size} better than {behind} on {task} {about}"
    return f"{ahead} is {size} ahead of {behind} on {task}, which may be chance {about}"
