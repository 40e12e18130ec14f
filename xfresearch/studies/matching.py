"""Arms of equal cost: solves for the size or the number of updates with which an arm costs as much as the arm that it is
matched to (design.reference), which is the baseline unless a study says otherwise.

Seconds depend on the machine: an update of every cell is timed (study_plan.py), and the number of updates follows.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError
from xfresearch.studies import rates
from xfresearch.studies.cells import Cell, Ladder, cells, tuned
from xfresearch.studies.design import Study, config_of, reference, rungs

LARGEST = 16  # times the size that the arm has before
EQUAL = 0.001  # mismatch with which an arm keeps the size that it has
LARGEST_MISMATCH = 0.05  # of the matched cost, in a study that is not tiny


class Matched(NamedTuple):
    """The config of an arm at a size, and how far its cost is from that of the reference."""

    config: Config
    solved: str  # 'model.blocks.main.feed_forward.hidden=344'; '' if nothing was solved for
    parameters: int
    training_flops: float  # of the whole run
    mismatch: float  # of the matched cost, relative to the reference's


def training_flops(config: Config) -> float:
    """FLOPs of all updates of a run."""
    return float(costs(config.model, config.sequence_length).training_flops_per_token) * tokens(config)


def tokens(config: Config) -> float:
    return float(config.steps * config.batch_size * config.sequence_length)


def parameters(config: Config) -> float:
    return float(costs(config.model, config.sequence_length).parameters)


COSTS: dict[str, Callable[[Config], float]] = {"flops": training_flops, "parameters": parameters, "tokens": tokens}


def all_matched(study: Study, seconds: Mapping[Cell, float]) -> dict[Cell, Matched]:
    """Every cell. A size that is solved for is the same with all budgets, so it is solved for once."""
    by_cell: dict[Cell, Matched] = {}
    sizes = {rung.name: rung.size for rung in rungs(study)}
    solved: dict[tuple[str, str], str] = {}
    for cell in cells(study):
        of_size = sizes[cell.rung], cell.arm
        by_cell[cell] = matched(study, cell, seconds, solved.get(of_size, ""))
        if not by_cell[cell].solved.startswith("steps="):
            solved[of_size] = by_cell[cell].solved
    return by_cell


def ladder(study: Study, solved: Mapping[Cell, Matched]) -> Ladder:
    """The study with the scales of its rungs."""
    names = [rung.name for rung in rungs(study)]
    tuned_at = dict.fromkeys(cell.rung for cell in tuned(study))
    return Ladder(study, rates.carry(scales(study, solved), [names.index(name) for name in tuned_at]))


def scales(study: Study, solved: Mapping[Cell, Matched]) -> np.ndarray:
    """[R, 2]: log parameters and log tokens of the reference at each rung."""
    references = [solved[Cell(rung.name, reference(study))] for rung in rungs(study)]
    return np.log([[each.parameters, tokens(each.config)] for each in references])


def axes(study: Study, solved: Mapping[Cell, Matched]) -> np.ndarray:
    """[R, 2]: the log of the study's trend (`trend_of`), and of the tokens for each parameter (growth.AXES)."""
    references = [solved[Cell(rung.name, reference(study))] for rung in rungs(study)]
    ratios = [tokens(each.config) / each.parameters for each in references]
    return np.log(np.stack([[trend_of(study, each) for each in references], ratios], 1))


def matched(study: Study, cell: Cell, seconds: Mapping[Cell, float], known: str = "") -> Matched:
    """A cell with the solved option, which is `known` or solved for. seconds: of an update of a cell, for match='seconds'.
    Raises UserError if no value is enough; the mismatch shows if none is small enough."""
    rung, arm = cell
    cost = _cost(study, seconds.get(cell))
    other = Cell(rung, reference(study))
    target = _cost(study, seconds.get(other))(config_of(study, *other))
    key = study.solve_in.get(arm, study.solve if cell != other else "")
    solved = known or (f"{key}={_solve(study, cell, key, cost, target)}" if key else "")
    config = config_of(study, rung, arm, *([solved] if solved else []))
    mismatch = cost(config) / target - 1
    return Matched(config, solved, int(parameters(config)), training_flops(config), mismatch)


def _cost(study: Study, seconds: float | None) -> Callable[[Config], float]:
    """The cost that is matched, as a function of a config. seconds: of an update of this config."""
    if study.match in COSTS:
        return COSTS[study.match]
    assert seconds is not None, "of a study that matches seconds"
    return lambda config: config.steps * seconds


def _solve(study: Study, cell: Cell, key: str, cost: Callable[[Config], float], target: float) -> int:
    """The value of an integer option, a multiple of config.multiple, with which the cost is closest to the target. An arm
    that costs as much with its own value keeps it. The cost rises with the option, in most cases linearly. So a linear guess
    and its two neighbours are tried before the range is halved."""
    size, arm = cell
    unit = 1 if key == "steps" else study.multiple
    try:
        first = value_at(config_of(study, size, arm), key, f"solve_in.{arm}" if arm in study.solve_in else "solve")
    except UserError as error:
        raise UserError(f"arm {arm} at size {size}: {error}; study.solve_in.{arm} may be another one, or ''") from error
    if abs(cost(config_of(study, size, arm)) / target - 1) < EQUAL:
        return first
    low, high = 1, max(2, LARGEST * first // unit)
    tries = "whole numbers" if key == "steps" else f"multiples of config.multiple={unit}"

    @cache
    def at(number: int) -> float:
        try:
            return cost(config_of(study, size, arm, f"{key}={number * unit}"))
        except UserError as error:
            raise UserError(f"{error} (config.solve tries {tries})") from error

    if not at(high // 2) < at(high):
        raise UserError(f"arm {arm} at size {size}: {key} cannot be solved for: it does not change the {study.match}")
    if at(high) < target:
        raise UserError(
            f"arm {arm} at size {size}: {key}={high * unit} is not enough for the {study.match} of {reference(study)}: "
            f"config.solve tries no more than {LARGEST} times the arm's own {key}={first}. Give the arm a larger one"
        )
    guess = int(high - (at(high) - target) * (high - high // 2) / (at(high) - at(high // 2)))
    guesses = [guess, guess + 1, guess - 1]
    while high - low > 1:
        middle = guesses.pop(0) if guesses else (low + high) // 2
        if low < middle < high:
            low, high = (middle, high) if at(middle) < target else (low, middle)
    return unit * min((low, high), key=lambda number: abs(at(number) - target))


def trend_of(study: Study, of_size: Matched) -> int:
    """The quantity in which the sizes of a study differ (`trend`: parameters, or an option), for the reference of one
    size."""
    return of_size.parameters if study.trend == "parameters" else value_at(of_size.config, study.trend, "trend")


def value_at(config: Config, key: str, field: str = "solve") -> int:
    """The integer option of a config at a dotted path. Raises UserError that names the study's `field` if there is none."""
    value: object = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    if not isinstance(value, int) or isinstance(value, bool):
        allowed = "an integer option of its config, such as 'steps'"
        raise UserError(f"config.{field}={key!r} is not allowed: it must be {allowed}")
    return value
