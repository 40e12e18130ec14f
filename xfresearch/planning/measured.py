"""Measured updates on accelerators: the data of a plan's expected time, and the rule that applies them.

Model-FLOPs utilisation counts three times the FLOPs of the forward pass, attention in full, over the chip's peak for
bfloat16 (xfresearch/runtime/hardware.py). All updates: bfloat16, one device, the best settings that were tried.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

from xfresearch.models.model_config import mixtures
from xfresearch.run_config.config import Config

DTYPE = "bfloat16"


@dataclass(frozen=True)
class Measured:
    chip: str  # a key of CHIPS
    model: str
    width: int  # of the residual stream
    experts: bool  # whether the model has a mixture of experts
    utilisation: float
    settings: str
    source: str


_H200 = "one H200, 2026-11-27, commit f688592, jax 0.11.2, CUDA 13"
MEASURED = (
    Measured("h200", "gpt2 124M", 768, False, 0.410, "32 x 1024, V 50304, unrolled, loss_rows 32768", _H200),
    Measured("h200", "llama 953M", 2048, False, 0.496, "16 x 2048, scanned", _H200),
    Measured("h200", "moe 510M", 1024, True, 0.110, "32 x 1024, expert_kernel=ragged, loss_rows 8192", _H200),
)


def most_similar(chip: str, config: Config, rows: Iterable[Measured] = MEASURED) -> Measured | None:
    """The update on this chip of the model that is most like the config's: with experts or without, of the nearest width.
    None if nothing like it was measured there."""
    experts = any(mixtures(config.model))
    alike = [row for row in rows if (row.chip, row.experts, DTYPE) == (chip, experts, config.model.dtype)]
    return min(alike, key=lambda row: abs(log(row.width / config.model.width)), default=None)


def expected_seconds(row: Measured, ideal: float, recomputed: float, collectives: float) -> float:
    """Seconds of a step that computes as well as the measured one, and in which no collective overlaps.

    ideal: seconds of the model's FLOPs at the peak. recomputed: FLOPs of the step over the model's. collectives: seconds.
    """
    return ideal * max(recomputed, 1) / row.utilisation + collectives
