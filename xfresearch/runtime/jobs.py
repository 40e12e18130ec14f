"""Numbered jobs: one of many processes, each of which does a part of the work of one command, in any order and at any time.

Slurm numbers the jobs of an array (--array), and Kubernetes the pods of an indexed job. launch/slurm.sbatch and
launch/gke_jobs.sh start a job for each part (docs/launch.md).
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from xfresearch.runtime.errors import UserError

NUMBERS = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")  # of an array of Slurm, and of an indexed job of Kubernetes
COUNT = "count"
Part = TypeVar("Part")


def add_flag(add: Callable, part: str) -> None:
    """Adds --job with an argparse parser's `add_argument`. `part`: what a job does, such as 'run' or 'checkpoint'."""
    numbers = " or ".join(f"${name}" for name in NUMBERS)
    text = f"do one {part} only: the I-th, from 0; 'auto' for the number in {numbers}; '{COUNT}' prints how many there are"
    add("--job", metavar="I", help=text)


def job_number() -> int | None:
    """The number of this job in its array; None outside of one."""
    text = next((os.environ[name] for name in NUMBERS if name in os.environ), "")
    return int(text) if text.isdecimal() else None


def chosen(parts: Sequence[Part], text: str) -> Part:
    """The part with the number that --job gives. Raises UserError if there is none."""
    if text == "auto":
        text = str(job_number() if job_number() is not None else text)
    if not text.isdecimal() or int(text) >= len(parts):
        allowed = f"at least 0 and at most {len(parts) - 1}, '{COUNT}', or 'auto' in a job that has {' or '.join(NUMBERS)}"
        raise UserError(f"--job={text} is not allowed: it must be {allowed}")
    return parts[int(text)]
