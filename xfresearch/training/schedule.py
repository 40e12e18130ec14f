"""When a run measures, and how much of the held-out text it reads."""

from xfresearch.data.pipeline import Split
from xfresearch.run_config.config import Config


def due(config: Config, step: int) -> list[bool]:
    """Whether an evaluation is due after update `step`, and whether the panel is."""
    return [bool(n) and (step % n == 0 or step == config.steps) for n in (config.evaluation.every, config.log.panel)]


def sequences(config: Config, step: int, held_out: int) -> int:
    """The number of `held_out` sequences that are evaluated after update `step`, 0 for all."""
    limits = config.evaluation
    limit = limits.final_sequences if step == config.steps else limits.sequences
    return limit if limit < held_out else 0


def text(config: Config, step: int, held_out: "Split | None") -> str:
    """What the evaluation after update `step` reads, as a name to compare; '' without held-out data."""
    if held_out is None:
        return ""
    count = sequences(config, step, len(held_out)) or len(held_out)
    return f"{count} sequences of the {config.evaluation.split} split {held_out.digest}"


def comparable(config: Config, step: int, held_out: int) -> bool:
    """Whether the evaluation after update `step` reads as much text as those before."""
    return sequences(config, step, held_out) == sequences(config, 0, held_out)
