"""The runner and the table of the operations: every round calls each row once, so that a busy machine slows all of them."""

import time
from collections.abc import Callable, Mapping, Sequence


def in_rounds(calls: Mapping[str, Callable[[], float]], rounds: int, untimed: int = 0) -> dict[str, list[float]]:
    """{name: the seconds that its call returned in each round}, without those of the first `untimed` rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(untimed + rounds):
        for name, call in calls.items():
            own = call()
            if number >= untimed:
                seconds[name].append(own)
    return seconds


def seconds_of(function: Callable, *arguments) -> float:
    """Seconds until the function has returned, and its arrays are there."""
    import jax

    began = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - began


def quartiles(name: str, values) -> dict[str, float]:
    """{name: the median, name_low and name_high: the quartiles}."""
    import numpy as np

    return dict(zip((name, f"{name}_low", f"{name}_high"), np.quantile(values, (0.5, 0.25, 0.75)).tolist(), strict=True))


def print_table(columns: Mapping[str, str], rows: Sequence[Mapping]) -> None:
    """Prints a row of figures on each line. columns: {title: format of its cells, such as '{ms:.2f}'}; a cell is '-' if the
    row lacks a figure, or if it is None."""
    from xfresearch.runtime.tables import table

    print(table({title: [_cell(form, row) for row in rows] for title, form in columns.items()}))


def _cell(form: str, row: Mapping) -> str:
    try:
        return form.format_map(row)
    except (KeyError, TypeError):
        return "-"
