"""Paired comparison of a model with a reference on the same items or text: the test is about the differences of the items,
not about two separate error bars.

If values are 0 or 1, the test is McNemar's exact test: it compares the model's share of the items that only one of the
two answers correctly with one half. The interval is that of Agresti and Min (2005), which adds half an item to each
of the four outcomes. Without that, the interval is far too narrow if the models differ on few items, and has width 0 if
they differ on none. For other values, test and interval are Student's for the mean difference. Several tasks are
several tests, so Holm's method corrects p over the tasks on which a metric is compared.

A held-out loss is a ratio of sums over units of text (documents or sequences). The residuals of the two ratios in each
unit give the standard error of their difference, with Student's t for one unit less than there are.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from xfresearch.runtime.summaries import summary

CONFIDENCE = 0.95
MCNEMAR = "McNemar, exact"
STUDENT = "Student, paired"
ROUNDING = 1e-6  # of float32, relative: two ways to compute one function may differ by less than this


def pair(values: Sequence[float], reference: Sequence[float]) -> dict:
    """The paired comparison of a model's values with those of the reference on the same items. Differences are the
    model's value minus the reference's."""
    differences = [a - b for a, b in zip(values, reference, strict=True)]
    n = len(differences)
    mean, deviation = summary(differences)
    error = deviation / math.sqrt(n)
    higher = sum(d > 0 for d in differences)
    lower = sum(d < 0 for d in differences)
    binary = all(value in (0, 1) for value in (*values, *reference))
    return {
        "items": n,
        "value": math.fsum(values) / n,
        "reference": math.fsum(reference) / n,
        "difference": mean,
        "standard_error": error,
        "interval": agresti_min(higher, lower, n) if binary else student_interval(mean, error, n),
        "higher": higher,
        "lower": lower,
        "test": MCNEMAR if binary else STUDENT,
        "p": mcnemar(higher, lower) if binary else student(mean, error, n),
    }


def pair_ratios(sums: tuple[np.ndarray, np.ndarray], reference: tuple[np.ndarray, np.ndarray]) -> dict:
    """The paired comparison of two losses on the same text. Each is given as its sums over the units of text [U]: nats
    or bits, and tokens or bytes. The difference is the model's loss minus the reference's."""
    loss, residuals_U = _residuals(*sums)
    other, other_residuals_U = _residuals(*reference)
    n = int(((sums[1] > 0) | (reference[1] > 0)).sum())
    error = _error(residuals_U - other_residuals_U, n)
    return {
        "units": n,
        "value": loss,
        "reference": other,
        "difference": loss - other,
        "standard_error": error,
        "interval": student_interval(loss - other, error, n),
        "test": STUDENT,
        "p": student(loss - other, error, n),
        "lower_is_better": True,
    }


def ratio(values_U: np.ndarray, sizes_U: np.ndarray) -> dict:
    """The ratio of two sums over units [U], its standard error and the number of units."""
    value, residuals_U = _residuals(values_U, sizes_U)
    n = int((sizes_U > 0).sum())
    return {"value": value, "standard_error": _error(residuals_U, n), "units": n}


def _residuals(values_U: np.ndarray, sizes_U: np.ndarray) -> tuple[float, np.ndarray]:
    """The ratio of the sums, and the part of its error that each unit causes."""
    size = math.fsum(sizes_U)
    value = math.fsum(values_U) / size
    return value, (values_U - value * sizes_U) / size


def _error(residuals_U: np.ndarray, n: int) -> float:
    """The standard error of a ratio from its residuals in n units; NaN for a single unit."""
    return math.sqrt(math.fsum(np.square(residuals_U)) * n / (n - 1)) if n > 1 else math.nan


def mcnemar(higher: int, lower: int) -> float:
    """The two-sided p: the binomial probability of a split at least as uneven of the items that only one of the two
    answers correctly."""
    from scipy.stats import binomtest

    return float(binomtest(higher, higher + lower).pvalue) if higher + lower else 1.0


def agresti_min(higher: int, lower: int, n: int) -> list[float]:
    """The interval of the difference of two proportions of the same n items. Only the model answers `higher` of them
    correctly, only the reference `lower` of them."""
    from scipy.stats import norm

    up, down, n = higher + 0.5, lower + 0.5, n + 2
    center = (up - down) / n
    margin = float(norm.ppf((1 + CONFIDENCE) / 2)) * math.sqrt(up + down - (up - down) ** 2 / n) / n
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


def correct(comparisons: Iterable[dict]) -> None:
    """Adds `p_holm`, the corrected p, to paired comparisons that are tested together."""
    comparisons = list(comparisons)
    for comparison, p in zip(comparisons, holm([comparison["p"] for comparison in comparisons]), strict=True):
        comparison["p_holm"] = p


def verdict(comparison: dict, margin: float = 0.0) -> str:
    """A paired comparison with its corrected p in words.

    Two models are equal only if the whole interval lies within `margin` on both sides of 0. One is better only if the
    interval excludes 0, and what rounding explains, and the corrected p is below 0.05.
    """
    low, high = comparison["interval"]
    rounding = ROUNDING * abs(comparison["reference"])
    if not math.isfinite(comparison["difference"]):
        return "not finite"
    if -margin < low and high < margin:
        return f"equal within {margin:g}"
    if not (low > rounding or high < -rounding) or not comparison["p_holm"] < 1 - CONFIDENCE:
        return "no difference shown"
    return "worse" if (low > 0) == comparison["lower_is_better"] else "better"


def of_runs(sample: str, comparison: dict, margin: float = 0.0) -> str:
    """The verdict on two runs in words, which name the `sample` that it is about. Runs of one seed each show nothing about
    the change that distinguishes them (seeds.py)."""
    words = verdict(comparison, margin)
    return words if words in ("not finite", "no difference shown") else f"{words} on this {sample}"
