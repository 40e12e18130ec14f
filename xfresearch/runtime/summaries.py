"""Summaries of repeated measurements."""

import math
import statistics
from typing import Any

import numpy as np


def summary(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (NaN for a single value). Both are NaN if any value is NaN: a run diverged."""
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def mean_interval(values, confidence: float = 0.95) -> tuple[float, float]:
    """The mean of independent values and the half width of its confidence interval, from Student's t distribution. NaNs
    are left out; the half width is NaN for fewer than two values."""
    from scipy import stats

    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    if len(values) < 2:
        return (float(values[0]) if len(values) else math.nan), math.nan
    error = values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1) * error)


def bootstrap_interval(statistic, *columns, confidence: float = 0.95, resamples: int = 2000) -> tuple[float, float, float]:
    """(statistic of columns of values, low, high): the ends of the bootstrap interval are percentiles over resampled rows,
    with a fixed seed, and NaN for fewer than two rows."""
    columns = tuple(np.asarray(column, np.float64) for column in columns)
    value, count = float(statistic(*columns)), len(columns[0])
    if count < 2 or math.isnan(value):
        return value, math.nan, math.nan
    rows = np.random.default_rng(0).integers(count, size=(resamples, count))
    resampled = [statistic(*(column[chosen] for column in columns)) for chosen in rows]
    low, high = np.nanquantile(resampled, (0.5 - confidence / 2, 0.5 + confidence / 2))
    return value, float(low), float(high)


def ratio_interval(above, below) -> tuple[float, float]:
    """mean(above) / mean(below) of independent pairs and the half width of its 95 % confidence interval, to first order.
    NaN if the mean of `below` is 0."""
    above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
    if not below.mean():
        return math.nan, math.nan
    ratio = above.mean() / below.mean()
    return mean_interval(ratio + (above - ratio * below) / below.mean())


def mean_of_known(values: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    """The mean of the values that are not NaN, in float64; NaN where there are none."""
    values = np.asarray(values, np.float64)
    known = ~np.isnan(values)
    count = known.sum(axis)
    return np.where(known, values, 0.0).sum(axis) / np.where(count, count, np.nan)
