"""Summaries of repeated measurements."""

import math
import statistics


def summary(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (NaN for a single value). Both are NaN if any value is NaN: a run diverged."""
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan
