"""--fork: a run resumes in its directory although its config, data or versions differ from those it was saved with."""

import sys
from pathlib import Path

from xfresearch.options.comparing import RESULT, differences
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError, require
from xfresearch.runtime.trees import by_path
from xfresearch.training.hyperparameters import hyper_of, learning_rate
from xfresearch.training.program import Program

PARTS = {"params": "model", "opt": "optimizer", "ema": "parameter average"}


def check_fork(workdir: Path, saved: Config | None, config: Config, steps: list[int]) -> None:
    """Raises UserError if the run in `workdir` has no good checkpoint, or if its state does not fit `config`. `saved` is the
    run's config; None if it is damaged. `steps` are those of its good checkpoints."""
    if not steps:
        raise UserError(
            f"--fork is not allowed with --workdir={workdir}, which has no good checkpoint to resume from: leave it out; to "
            "start from the parameters of another run, use --start RUN"
        )
    if saved is None:
        return
    if saved.start != config.start:
        raise UserError(
            f"config.start.path={config.start.path!r} is not allowed with --fork, which resumes from the checkpoints in "
            f"{workdir}: it must be {saved.start.path!r}, or use --start with a new directory"
        )
    before, now = (each.model.param_dtype for each in (saved, config))
    require(before == now, "model.param_dtype", now, f"{before!r} with --fork, the dtype of the checkpoints in {workdir}")
    require(config.steps >= steps[-1], "steps", config.steps, f"at least {steps[-1]}, the step of the newest checkpoint")
    _require_same_state(workdir, saved, config)


def say_changes(saved: Config | None, config: Config, step: int) -> None:
    """Says on standard error what changes in a run that resumes from `step`. `saved` is its config so far, if known."""
    if saved and (changed := differences(saved, config, deciding=RESULT)):
        old, new = (_rate(each, step) for each in (saved, config))
        rate = "" if old == new else f"; the learning rate of the next update is {new:.3g} instead of {old:.3g}"
        print(f"--fork: resumes from step {step} with {'; '.join(changed)}{rate}", file=sys.stderr)


def _require_same_state(workdir: Path, saved: Config, config: Config) -> None:
    """Raises UserError if training with the two configs has states of different arrays."""
    before, now = _shapes(saved), _shapes(config)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    for part, word in PARTS.items():
        for name in changed:
            if name.startswith(f"{part}/"):
                raise UserError(
                    f"--fork is not allowed with another {word} ({name}: {before.get(name, '(absent)')} -> "
                    f"{now.get(name, '(absent)')}): use a new directory, and --start={workdir} to start from its parameters"
                )


def _shapes(config: Config) -> dict[str, str]:
    """{path: dtype and shape} of the arrays of a run's state."""
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in by_path(Program(config).shapes).items()}


def _rate(config: Config, step: int) -> float:
    return float(learning_rate(config.optimizer.schedule, hyper_of(config), step))
