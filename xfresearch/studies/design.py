"""The design of a study: a question, a baseline, arms that differ from it, and the options that make the comparison fair.

A study is a config file (configs/studies/): its `get_config(size)` returns a ConfigDict of the fields of Study. An arm is
a list of overrides of a base config, such as 'model.blocks.main.layout=parallel'. Every arm trains at every size, with
learning rates that are chosen for it, and with seeds that it shares with the baseline.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from ml_collections import ConfigDict

from xfresearch.options.fields import option
from xfresearch.options.groups import to_config_dict
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.run_config.config_files import parse, parse_as
from xfresearch.run_config.resolving import with_vocabulary
from xfresearch.runtime.errors import UserError, nearest, require
from xfresearch.studies import probes

# Options that a study sets. An arm may have a seed, which is added to those of its runs: the baseline with other random
# numbers is an arm without a difference.
OF_A_RUN = ("seed", "optimizer.learning_rate")
LEAST_RATIO = 1.05  # of a rate to the one before: rates beyond the grid are rounded to three digits
LARGEST_UNEVENNESS = 1.25  # of the ratios of the grid: 0.001, 0.003, 0.01 has 3 and 3.33
TUNING_SEED = 1000  # and on: of the runs that choose a learning rate
Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Study:
    question: str = option("", "the question, as people ask it")
    rule: str = option("", "what will be concluded from which result, written before anything runs")
    base: str = option("", "config of the base: a name, or FILE[:arg]")
    options: Overrides = option((), "overrides of the base in every arm, such as 'steps=500'")
    sizes: dict[str, Overrides] = dataclasses.field(default_factory=dict)  # name: overrides
    more_sizes: dict[str, Overrides] = dataclasses.field(default_factory=dict)  # sizes that --add-rung adds later
    budgets: tuple[float, ...] = option((), "tokens for each parameter; () for as many as options say")
    arms: dict[str, Overrides] = dataclasses.field(default_factory=dict)  # name: overrides
    cells: dict[str, Overrides] = dataclasses.field(default_factory=dict)  # 'size/arm': further overrides
    baseline: str = option("", "the arm that the others are compared with")
    match: Literal["flops", "parameters", "tokens", "seconds"] = option(
        "flops", "what arms have as much of: FLOPs of training, parameters, tokens, or seconds of updates"
    )
    matched_to: str = option("", "the arm whose cost all have, and whose parameters budgets count; '': the baseline")
    solve: str = option("", "option that is solved for in every arm, such as 'steps' or 'model.width'; '' for none")
    solve_in: dict[str, str] = dataclasses.field(default_factory=dict)  # arm: another option, or '' for none
    multiple: int = option(8, "a size that is solved for is a multiple of this", low=1)
    rates: tuple[float, ...] = option((1e-3, 3e-3, 1e-2), "learning rates that every arm tries, in ascending order")
    tune_at: tuple[str, ...] = option((), "rungs whose learning rates are tried, for all rungs; () for each rung by itself")
    rate_runs: int = option(3, "runs of each hopeful learning rate; with 1 the best one that was tried decides", low=1)
    extensions: int = option(2, "further rates if the best one lies at the edge of those tried", low=0)
    seeds: int = option(5, "paired runs of every arm at its best learning rate", low=2, high=TUNING_SEED)
    looks: tuple[int, ...] = option((), "pairs of runs after which an arm that has a verdict at every rung gets no more")
    trend: str = option("parameters", "what sizes differ in: 'parameters', or an option such as 'sequence_length'")
    metric: Literal["bits_per_byte", "loss", "accuracy"] = option("bits_per_byte", "held-out measure that decides")
    margin: float = option(0.01, "largest difference of the metric that counts as none", above=0.0)
    deviation: float = option(
        0.01, "expected standard deviation of paired differences, for the plan", above=0.0
    )
    probes: tuple[str, ...] = option((), "what else is measured on every run (studies/probes.py)")
    task_data: str = option("", "directory of the data of probes 'tasks.NAME' (--task-data of evaluate)", decides="machine")
    machine: Overrides = option((), "overrides that are paths of a machine, such as 'data.cache_dir=...'", decides="machine")
    tiny: bool = option(False, "a trial of the command, whose report says that it shows nothing")
    keep: bool = option(False, "keep the checkpoints of all runs, not only their results")


class Rung(NamedTuple):
    """A step of the ladder: a size, trained on `budget` tokens for each parameter of the arm that the others are matched to
    (0: as options say)."""

    name: str
    size: str
    budget: float


def rungs(study: Study) -> list[Rung]:
    """The ladder of a study: its sizes, each with all budgets."""
    if not study.budgets:
        return [Rung(size, size, 0.0) for size in study.sizes]
    return [Rung(f"{size}-x{budget:g}", size, budget) for size in study.sizes for budget in study.budgets]


def reference(study: Study) -> str:
    """The arm whose cost the others have, and whose parameters budgets count."""
    return study.matched_to or study.baseline


def default_study() -> ConfigDict:
    """The ConfigDict that every file in `configs/studies/` starts from."""
    return to_config_dict(Study())


def read(arguments: list[str]) -> Study:
    """`--config FILE[:arg]` and `--config.key=value ...` as a Study. Raises UserError for any mistake in the design."""
    study = parse_as(Study, arguments)
    require(bool(study.question), "question", "", "the question that the study answers")
    require(bool(study.rule), "rule", "", "what will be concluded from which result")
    require(bool(study.base), "base", "", "a config file, such as 'gpt2:tiny'")
    require(bool(study.sizes), "sizes", {}, "at least one size")
    require(len(study.arms) > 1, "arms", tuple(study.arms), "at least two arms")
    _require_arm(study, "baseline", study.baseline)
    _require_arm(study, "matched_to", reference(study))
    for arm in study.solve_in:
        _require_arm(study, "solve_in", arm)
        allowed = f"an arm beside {reference(study)}, whose cost the others are solved for"
        require(arm != reference(study), "solve_in", arm, allowed)
    every = [f"{name}/{arm}" for name in study.sizes | study.more_sizes for arm in study.arms]
    for cell in study.cells:
        require(cell in every, "cells", cell, f"one of {', '.join(every)}{nearest(cell, every)}")
    apart = all(high >= LEAST_RATIO * low for low, high in pairwise(study.rates))
    valid = len(study.rates) > 1 and apart and study.rates[0] > 0 and math.isfinite(study.rates[-1])
    allowed = f"two rates or more, each at least {LEAST_RATIO - 1:.0%} above the one before"
    require(valid, "rates", study.rates, allowed)
    ratios = [high / low for low, high in pairwise(study.rates)]
    allowed = "rates with nearly equal ratios, such as 0.001, 0.003, 0.01: rates beyond the grid go on with the first one"
    require(max(ratios) <= LARGEST_UNEVENNESS * min(ratios), "rates", study.rates, allowed)
    low_to_high = all(low < high for low, high in pairwise((0.0, *study.budgets)))
    require(low_to_high, "budgets", study.budgets, "numbers above 0 in ascending order")
    low_to_high = all(low < high for low, high in pairwise((1, *study.looks, study.seeds)))
    allowed = f"numbers of pairs from 2 to below config.seeds={study.seeds}, in ascending order"
    require(low_to_high, "looks", study.looks, allowed)
    names = [rung.name for rung in rungs(study)]
    for name in study.tune_at:
        require(name in names, "tune_at", name, f"rungs, () or some of {', '.join(names)}{nearest(name, names)}")
    require_names(study)
    _require_overrides(study)
    _require_solvable(study)
    probes.check(study.probes, study.task_data)
    return dataclasses.replace(study, sizes=_ascending(study))


def with_sizes(study: Study, names: Iterable[str]) -> Study:
    """The study with some of its further sizes. Names of sizes that it has are left out. Raises UserError for others."""
    new = [name for name in names if name not in study.sizes]
    for name in new:
        allowed = f"one of config.more_sizes, {', '.join(study.more_sizes) or 'which has none'}"
        if name not in study.more_sizes:
            raise UserError(f"--add-rung={name} is not allowed: it must be {allowed}{nearest(name, study.more_sizes)}")
    more = {name: study.more_sizes[name] for name in new}
    larger = dataclasses.replace(study, sizes=study.sizes | more)
    return dataclasses.replace(larger, sizes=_ascending(larger)) if more else study


def require_names(study: Study) -> None:
    """Raises UserError for a size or an arm whose name is not that of a directory."""
    for kind in ("sizes", "more_sizes", "arms"):
        for name in getattr(study, kind):
            allowed = "letters, digits, '_' and '-', as the name of a directory"
            require(bool(re.fullmatch(r"[A-Za-z0-9_-]+", name)), kind, name, allowed)


def _require_solvable(study: Study) -> None:
    """Raises UserError for an option of `solve_in` that cannot change the cost that `match` names."""
    solved_for = {study.solve, *study.solve_in.values()} - {""}
    others = solved_for - {"steps"}
    allowed = "'' with match='tokens', which leaves nothing to solve for"
    require(study.match != "tokens" or not solved_for, "solve", ", ".join(solved_for), allowed)
    require(study.match != "seconds" or not others, "solve", ", ".join(others), "'steps' with match='seconds'")


def _require_overrides(study: Study) -> None:
    """Raises UserError for an override without a value, and for one of an option that the study sets for each run."""
    kinds = ("sizes", "more_sizes", "arms", "cells")
    named = {f"{kind}.{name}": each for kind in kinds for name, each in getattr(study, kind).items()}
    for key, overrides in ({"options": study.options, "machine": study.machine} | named).items():
        for each in overrides:
            valid = "=" in each and not each.startswith(("config.", "--"))
            require(valid, key, each, "KEY=VALUE, such as 'steps=500', without 'config.'")
        of_a_run = OF_A_RUN[1:] if key.startswith("arms.") else OF_A_RUN
        wrong = ", ".join(each for each in overrides if each.partition("=")[0] in of_a_run)
        require(not wrong, key, wrong, "another option: a study sets this one for each run (config.rates, config.seeds)")


def described(study: Study) -> dict[str, Any]:
    """The design as plain values, without paths of this machine, and without later options at their default, so that the
    ledgers of studies from before them stay as they are."""
    left_out = ("machine", "task_data", *(name for name in ("looks", "matched_to") if not getattr(study, name)))
    return {name: value for name, value in dataclasses.asdict(study).items() if name not in left_out}


def _ascending(study: Study) -> dict[str, Overrides]:
    """The sizes by the parameters of the reference, then by its length: a ConfigDict has lost their order."""

    def order(size: str) -> tuple[int, int]:
        return _of_reference(study, size)[:2]

    return {size: study.sizes[size] for size in sorted(study.sizes, key=order)}


def _require_arm(study: Study, key: str, arm: str) -> None:
    require(arm in study.arms, key, arm, f"one of the arms, {', '.join(study.arms)}{nearest(arm, study.arms)}")


def config_of(study: Study, rung: str, arm: str, *more: str) -> Config:
    """The resolved config of an arm at a rung, with further overrides. Raises UserError that names the arm."""
    from xfresearch.data.labels import trains_on_labels
    from xfresearch.data.tokenizers import vocab_size

    at = next(each for each in rungs(study) if each.name == rung)
    steps = (f"steps={_steps(study, at)}",) if at.budget else ()
    of_cell = (*study.sizes[at.size], *steps, *study.arms[arm], *study.cells.get(f"{at.size}/{arm}", ()))
    try:
        config = _parsed(study.base, (*study.options, *study.machine, *of_cell, *more))
    except UserError as error:
        raise UserError(f"arm {arm} at size {rung}: {error}") from error
    return config if trains_on_labels(config.data) else with_vocabulary(config, vocab_size(config.data))


def _steps(study: Study, rung: Rung) -> int:
    """The updates of the reference that read its budget of tokens."""
    parameters, _, tokens_per_update = _of_reference(study, rung.size)
    return max(1, round(rung.budget * parameters / tokens_per_update))


def _of_reference(study: Study, size: str) -> tuple[int, int, int]:
    """Parameters, length and tokens of an update of the reference at a size."""
    arm = reference(study)
    of_cell = (*study.sizes[size], *study.arms[arm], *study.cells.get(f"{size}/{arm}", ()))
    try:
        return _of_base(study.base, (*study.options, *study.machine, *of_cell))
    except UserError as error:
        raise UserError(f"arm {arm} at size {size}: {error}") from error


@cache
def _of_base(base: str, overrides: Overrides) -> tuple[int, int, int]:
    from xfresearch.data.labels import trains_on_labels
    from xfresearch.data.tokenizers import vocab_size

    config = _parsed(base, overrides)
    if not trains_on_labels(config.data):
        config = with_vocabulary(config, vocab_size(config.data))
    length = config.sequence_length
    return costs(config.model, length).parameters, length, config.batch_size * length


def _parsed(base: str, overrides: Overrides) -> Config:
    return parse(["--config", base, *(f"--config.{each}" for each in overrides)])
