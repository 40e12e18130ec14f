"""Where and when the figures of a page were measured."""

import time


def environment() -> dict:
    """The date, machine, library versions and commit of a measurement."""
    from xfresearch.hardware import describe_machine, git_commit, versions

    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions(),
        "commit": git_commit(),
    }
