"""Arms of equal cost: solves for the size or the number of updates with which an arm costs as much as the arm that it is
matched to (design.reference), which is the baseline unless a study says otherwise. Then `check` finds the mistakes in a
design that show only if the configs of its arms are compared, before anything runs.

Seconds depend on the machine: an update of every cell is timed, kept in seconds.json, and the number of updates follows.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from etils import epath

from xfresearch.data.labels import predicted, predicts_next, trains_on_labels
from xfresearch.options.comparing import differences, fingerprint
from xfresearch.options.fields import leaves
from xfresearch.run_config.closed_form import costs
from xfresearch.run_config.config import Config
from xfresearch.runtime import hardware
from xfresearch.runtime.errors import UserError, require
from xfresearch.runtime.files import exists, inside, read_object, write_json
from xfresearch.runtime.progress import stage
from xfresearch.runtime.schema import ANY, Maybe
from xfresearch.runtime.schema import check as check_schema
from xfresearch.studies import probes, rates
from xfresearch.studies.allocation import Cell, Ladder, Trial, cells, tuned
from xfresearch.studies.design import Study, config_of, reference, rungs
from xfresearch.studies.measurement import config_of_trial, machine_in_words
from xfresearch.training.timing import relative_seconds, same_seconds, seconds_per_update

LARGEST = 16  # times the size that the arm has before
EQUAL = 0.001  # mismatch with which an arm keeps the size that it has
LARGEST_MISMATCH = 0.05  # of the matched cost, in a study that is not tiny
SECONDS = "seconds.json"
TIMES = {"updates": {ANY: {"seconds": float}}, "machine": Maybe(str)}  # what it has
# What the runs of a pair share: the same batches in the same order, and the same held-out text.
SHARED = ("config.data.", "config.batch_size:", "config.sequence_length:", "config.source_length:", "config.evaluation.")
OF_NEXT_TOKENS = ("copying", "recall")  # probes of the loss of the next token


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


def read_seconds(study: Study, workdir, configs: Mapping[Cell, Config]) -> dict[Cell, float]:
    """The seconds of an update of each cell that was timed with the config that it has now. An arm was timed in turns with
    the baseline, so its time counts only beside the baseline's of that moment."""
    updates = read_times(workdir)["updates"]
    known = {cell: updates.get("/".join(cell), {}) for cell in configs}
    now = {cell: same_seconds(config) for cell, config in configs.items()}
    known_seconds = {cell: each["seconds"] for cell, each in known.items() if each.get("config") == now[cell]}
    return {cell: value for cell, value in known_seconds.items() if Cell(cell.rung, study.baseline) in known_seconds}


def time_updates(study: Study, workdir, configs: Mapping[Cell, Config]) -> dict[Cell, float]:
    """The seconds of an update of each cell. Those that the directory does not have are timed, and kept there, with the
    machine on which the first ones were timed."""
    known = read_seconds(study, workdir, configs)
    seconds = timings(study, configs, known)
    machine = (known and read_times(workdir).get("machine")) or machine_in_words(hardware.describe_machine())
    updates = {"/".join(cell): {"seconds": value, "config": same_seconds(configs[cell])} for cell, value in seconds.items()}
    write_json(epath.Path(workdir) / SECONDS, {"machine": machine, "updates": updates})
    return seconds


def read_times(workdir) -> dict:
    """What seconds.json has. Raises UserError for a file that is damaged."""
    file = inside(workdir, SECONDS)
    times = read_object(file) if exists(file) else {"updates": {}}
    try:
        return check_schema(times, TIMES, file)
    except UserError as error:
        raise UserError(f"{error}: remove the file, and --time times them again") from None


def timings(study: Study, configs: Mapping[Cell, Config], known: Mapping[Cell, float]) -> dict[Cell, float]:
    """The seconds of an update of each cell on this machine: those that are known, and for the others, such as an arm that
    was added, as many times the baseline's as is measured now. Cells that differ in their number of updates alone are timed
    once. known: no arm without the baseline at its size."""
    seconds = dict(known)
    missing = [cell for cell in configs if cell not in known]
    if not missing:
        return seconds
    baseline = {cell: Cell(cell.rung, study.baseline) for cell in configs}
    digest = {cell: same_seconds(config) for cell, config in configs.items()}
    kind = {cell: (digest[cell], digest[baseline[cell]]) for cell in configs}
    ratios = {kind[cell]: value / known[baseline[cell]] for cell, value in known.items()}
    of_baselines = {kind[cell]: value for cell, value in known.items() if cell == baseline[cell]}
    with stage("timing updates", len({kind[cell] for cell in missing}), "configs") as progress:
        for cell in missing:
            base = baseline[cell]
            if kind[base] not in of_baselines:
                of_baselines[kind[base]], ratios[kind[base]] = seconds_per_update(configs[base]), 1.0
                progress.update(1)
            if kind[cell] not in ratios:
                ratios[kind[cell]] = relative_seconds(configs[cell], configs[base])
                progress.update(1)
            seconds.setdefault(base, of_baselines[kind[base]])
            seconds[cell] = seconds[base] * ratios[kind[cell]]
    return seconds


def check(study: Study, solved: Mapping[Cell, Matched]) -> None:
    """Raises UserError if two arms are the same, if an arm does not cost what the reference does, if arms of a size read
    other data, or if the metric or the trend is not defined."""
    _require_machine(study, next(iter(solved.values())).config)
    for cell, each in solved.items():
        if path := each.config.start.path:
            raise UserError(
                f"arm {cell.arm} at size {cell.rung}: config.start.path={path!r} is not allowed: it must be '', because "
                "every run of a study begins with new parameters"
            )
    for rung in rungs(study):
        configs = {arm: solved[Cell(rung.name, arm)].config for arm in study.arms}
        _require_pairs(study, rung.name, configs)
        _require_different(rung.name, configs)
        _require_metric(study, configs[study.baseline])
    if not study.tiny:  # whose widths leave large steps between the sizes
        _require_equal_cost(study, solved)
    _require_trend(study, solved)


def _require_machine(study: Study, config: Config) -> None:
    """Raises UserError if an option of the machine decides a result: the stored design has no options of the machine."""
    decides = {leaf.path: leaf.decides for leaf in leaves(config)}
    for override in study.machine:
        kind = decides.get(override.partition("=")[0], "machine")
        require(kind == "machine", "machine", override, "a path of this machine, such as 'data.manual_dir=DIR'")


def _require_equal_cost(study: Study, solved: Mapping[Cell, Matched]) -> None:
    for cell, each in solved.items():
        if abs(each.mismatch) > LARGEST_MISMATCH and study.solve_in.get(cell.arm) != "":
            raise UserError(
                f"arm {cell.arm} at size {cell.rung}: its {study.match} are {each.mismatch:+.1%} relative to "
                f"those of {reference(study)}: {_remedy(study, each)}, or set study.solve_in.{cell.arm} = '' in "
                "its file (not matched)"
            )


def _remedy(study: Study, arm: Matched) -> str:
    """How the user can make the cost of an arm equal to that of the reference, in words."""
    if study.match == "tokens":
        return "give all arms as many updates, and batches of one size"
    if not arm.solved:
        return f"set config.solve to {'steps' if study.match == 'seconds' else 'an option that changes them'}"
    if arm.solved.startswith("steps="):
        return f"give {reference(study)} more updates, because {arm.solved} is the nearest number"
    return f"set config.multiple below {study.multiple}, because {arm.solved} is the nearest that it allows"


def _require_pairs(study: Study, size: str, configs: Mapping[str, Config]) -> None:
    for arm, config in configs.items():
        changed = [line for line in differences(configs[study.baseline], config) if line.startswith(SHARED)]
        if changed:
            raise UserError(f"arm {arm} at size {size}: {'; '.join(changed)}: all arms of a size must read the same text")


def _require_different(size: str, configs: Mapping[str, Config]) -> None:
    first: dict[str, str] = {}
    for arm, config in configs.items():
        same = first.setdefault(fingerprint(config_of_trial(Trial(Cell(size, arm), 1.0, 0), config)), arm)
        if same != arm:
            raise UserError(f"arm {arm} at size {size} is the same as {same}: an arm must change what decides a result")


def _require_metric(study: Study, config: Config) -> None:
    next_tokens = predicts_next(config.data)
    allowed = f"'loss' or 'accuracy' with {predicted(config.data)}: bits per byte are those of next tokens"
    require(next_tokens or study.metric != "bits_per_byte", "metric", study.metric, allowed)
    of_tokens = ", ".join(each for each in study.probes if each in OF_NEXT_TOKENS)
    require(next_tokens or not of_tokens, "probes", of_tokens, "probes that need no prediction of the next token, or ()")
    of_labels = ", ".join(each for each in study.probes if each in probes.OF_LABELS)
    require(trains_on_labels(config.data) or not of_labels, "probes", of_labels, "probes that need no labels, or ()")
    pairs = not trains_on_labels(config.data) and config.data.objective.kind == "seq2seq"
    allowed = f"probes that need no targets of pairs: a run predicts {predicted(config.data)}"
    require(pairs or "exact_match" not in study.probes, "probes", "exact_match", allowed)
    allowed = "probes of models without an encoder, or a base with one"
    require(config.model.encoder is not None or "source" not in study.probes, "probes", "source", allowed)
    require(config.evaluation.split != "train", "options", "evaluation.split=train", "a split that no arm trains on")
    require(config.evaluation.every > 0, "options", "evaluation.every=0", "an interval: a study compares held-out metrics")


def _require_trend(study: Study, solved: Mapping[Cell, Matched]) -> None:
    if len(study.sizes) < 2:
        return
    first = {rung.size: rung.name for rung in reversed(rungs(study))}
    values = [trend_of(study, solved[Cell(first[size], reference(study))]) for size in study.sizes]
    allowed = f"'parameters' or an option, above 0, that differs between the sizes, here {', '.join(map(str, values))}"
    require(min(values) > 0 and len(set(values)) == len(values), "trend", study.trend, allowed)
