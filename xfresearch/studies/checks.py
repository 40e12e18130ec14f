"""Mistakes in a design that show only if the configs of its arms are compared. The plan finds them, before anything runs."""

from collections.abc import Mapping

from xfresearch.data.labels import predicted, predicts_next, trains_on_labels
from xfresearch.options.comparing import differences, fingerprint
from xfresearch.options.fields import leaves
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError, require
from xfresearch.studies import probes
from xfresearch.studies.cells import Cell, Trial
from xfresearch.studies.design import Study, reference, rungs
from xfresearch.studies.matching import LARGEST_MISMATCH, Matched, trend_of
from xfresearch.studies.running import config_of_trial

# What the runs of a pair share: the same batches in the same order, and the same held-out text.
SHARED = ("config.data.", "config.batch_size:", "config.sequence_length:", "config.source_length:", "config.evaluation.")

OF_NEXT_TOKENS = ("copying", "recall")  # probes of the loss of the next token


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
