"""docs/data/tables/kernels.md and flags.md: what `auto` chooses, and the flags that commands set."""

from xfresearch.kernels.defaults import BY_NAME, OWN, TABLES
from xfresearch.runtime import xla_flags

DEFAULTS_TITLE = """# What `auto` chooses

The first line that applies and supports the model (`xfresearch/kernels/defaults.py`). What each kernel supports:
[kernels](../../sharding.md).
"""
FLAGS_TITLE = """# Flags of XLA and NCCL

How they are set, and how you set others: [kernels](../../sharding.md#flags-of-xla-and-nccl). None was measured here, as no
machine with several accelerators was at hand.

| variable | flag | where | what for | source |
|---|---|---|---|---|
"""


def defaults() -> str:
    """What `auto` chooses, and the kernels of this project."""
    parts = [DEFAULTS_TITLE]
    for option, lines in TABLES.items():
        parts.append(f"\n## {option}\n\n| choice | where | why | measured |\n|---|---|---|---|\n")
        for line in lines:
            choice = "by memory" if callable(line.choice) else f"`{line.choice}`"
            parts.append(f"| {choice} | {line.where} | {line.reason} | {line.measured} |\n")
    parts.append("\n## Kernels of ours\n\n| kernel | chosen by | libraries have | why it stays |\n|---|---|---|---|\n")
    parts += [f"| {name} | {own.chosen} | {own.libraries} | {own.reason} |\n" for name, own in OWN.items()]
    parts += ["\nChosen by name only:\n\n", *(f"- `{name}`: {reason}\n" for name, reason in BY_NAME.items())]
    return "".join(parts)


def flags() -> str:
    """The flags that commands set for several accelerators."""
    parts = [FLAGS_TITLE]
    for row in xla_flags.TABLE:
        where = ", ".join(row.chips).replace("GPUs", "several GPUs")
        parts.append(f"| {row.variable} | `{row.text}` | {where} | {row.purpose} | {row.source}; {row.measured} |\n")
    return "".join(parts)
