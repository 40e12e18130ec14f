"""Collects the data and the notes of a comparison, before they are printed or drawn."""

from typing import NamedTuple

from xfresearch.comparing import held_out, runs, seeds, tasks
from xfresearch.data.labels import predicted, trains_on_labels
from xfresearch.evaluation.held_out import settings
from xfresearch.loading import loading
from xfresearch.runtime.errors import UserError
from xfresearch.training.workdir import starts

MACHINE = ("cpu", "cores", "devices")  # what decides the speed of a run
UNITS = {"loss": "nats per {target}", "bits_per_byte": "bits per byte"}


class Comparison(NamedTuple):
    """The runs, for their curves, and `data`, which is what --json writes."""

    runs: list[runs.ComparedRun]
    data: dict


def collect(options) -> Comparison:
    """Reads and measures the runs as `options` say. Every process must call it.

    Raises UserError if a path is not a model, the first model cannot read the held-out data, or one run predicts labels
    and another next tokens. A note names everything else that a run lacks.
    """
    require_one_target(options.runs)
    measured, reference, notes = measure_all(options)
    each = [runs.read(path, measured.get(path)) for path in options.runs]
    measure = "loss" if len({run.tokenizer for run in each}) == 1 else "bits_per_byte"
    sums = {path: model.sums for path, model in measured.items()}
    losses = held_out.compare(sums, measure, options.margin) if measured else {}
    compared, task_notes = tasks.compare({path: model.tasks for path, model in measured.items()}, options.task_margin)
    target = "label" if trains_on_labels(each[0].config.data) else "token"
    summaries = {run.path: runs.summary(run, measure) | {"held_out": losses.get(run.path)} for run in each}
    data = {
        "unit": UNITS[measure].format(target=target),
        "measure": measure,
        "differences": runs.differences(each),
        "runs": summaries,
        "groups": seeds.compare(each, summaries, options.margin),
        "held_out": settings(reference.data) | {"description": reference.data.description} if reference else None,
        "tasks": compared,
        "notes": [*notes, *gaps(each, measured), *other_machines(each), *lost(measured, measure), *task_notes],
    }
    return Comparison(each, data)


def require_one_target(paths: list[str]) -> None:
    """Raises UserError if one run predicts labels and another next tokens: their losses have nothing in common."""
    first, *others = (predicted(loading.run_config(path).data) for path in paths)
    for path, other in zip(paths[1:], others, strict=True):
        if other != first:
            both = f"it predicts {other}, and {paths[0]} predicts {first}"
            raise UserError(f"RUN={path} is not allowed: {both}")


def measure_all(options) -> tuple[dict, held_out.Reference | None, list[str]]:
    """({path: held_out.Measured}, the data as the first model reads them, notes). The models are loaded one after the
    other. Without the first model, nothing is measured."""
    measured = {}
    reference = None
    notes = []
    for path in options.runs:
        try:
            model = held_out.load(path, options, reference)
        except UserError as error:
            # A run has its curves all the same. A model without a run has nothing else to compare.
            if not all(map(runs.has_metrics, [path] if reference else options.runs)):
                raise
            notes.append(f"{path} has no held-out loss: {error}")
            if reference is None:
                return {}, None, [*notes, f"{path} is the first run, so no other run is compared with its loss"]
            continue
        reference = reference or held_out.first_reads(model, options)
        measured[path] = held_out.measure(model, options, reference)
        del model  # the next one needs its memory
    return measured, reference, notes


def gaps(each: list[runs.ComparedRun], measured: dict) -> list[str]:
    """A note for each part that a run lacks."""
    notes = []
    for run in each:
        steps = [row["step"] for row in run.rows]
        if not run.rows:
            notes.append(f"{run.path} has no metrics, so it has no curves")
        elif not any("seconds" in row for row in run.rows):
            notes.append(f"{run.path} has no seconds in its metrics, so it has no curve by seconds")
        if run.rows and steps[-1] < run.config.steps:
            notes.append(f"{run.path} has not finished: it is at step {steps[-1]:,} of {run.config.steps:,}")
        if run.rows and run.path in measured and measured[run.path].step != steps[-1]:
            step = measured[run.path].step
            notes.append(f"the held-out loss of {run.path} is that of step {step:,}; its metrics end at {steps[-1]:,}")
    return notes


def lost(measured: dict, measure: str) -> list[str]:
    """A note for each run whose tokens do not give back all of the held-out text."""
    counts = ": its bits per byte are over the rest" if measure == "bits_per_byte" else ""
    return [f"{path}: {model.lost}{counts}" for path, model in measured.items() if model.lost]


def other_machines(each: list[runs.ComparedRun]) -> list[str]:
    """A note if the runs were trained on different machines."""
    machines = {}
    for run in each:
        started = starts(loading.locate(run.path)[0]) if run.rows else []
        if started:
            machines[run.path] = ", ".join(str(started[-1]["machine"].get(name)) for name in MACHINE)
    if len(set(machines.values())) < 2:
        return []
    where = "; ".join(f"{path} on {machine}" for path, machine in machines.items())
    return [f"the seconds are of different machines: {where}"]
