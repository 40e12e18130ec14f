"""How the time of a token grows with one size of a config, beside the growth of its FLOPs in closed form.

Time per token ~ size^exponent. The exponent is the slope of the line through the logarithms (least squares). Widths keep the
size of a head: heads, hidden units and slots grow with them. Lengths keep the tokens of a batch, as far as it has rows.
"""

from collections.abc import Callable

import numpy as np

from xfresearch.runtime.errors import UserError

FACTORS = (1, 2, 4)


def overrides_of_length(base, factor: int, _) -> dict[str, int]:
    rows = max(base.batch_size // factor, 1)
    return {"sequence_length": base.sequence_length * factor, "batch_size": rows}


def overrides_of_width(base, factor: int, with_changes: Callable) -> dict[str, int]:
    """Overrides of the width, the heads, and the sizes of sublayers that do not follow from these."""
    overrides = {"model.width": base.model.width * factor}
    overrides |= {path: factor * options.heads for path, options in _sizes(base, "heads")}
    wider = with_changes(overrides)
    for field in ("kv_heads", "hidden", "memory_slots"):
        for (path, options), (_, after) in zip(_sizes(base, field), _sizes(wider, field), strict=True):
            if getattr(after, field) == getattr(options, field) > 0:
                overrides[path] = factor * getattr(options, field)
    return overrides


def _sizes(config, field: str) -> list[tuple]:
    """(path of the field, options) of every sublayer that has it."""
    sizes = []
    for name, block in config.model.blocks.items():
        for sublayer, options in block.sublayers.items():
            if hasattr(options, field):
                sizes.append((f"model.blocks.{name}.{sublayer}.{field}", options))
    return sizes


def overrides_of_depth(base, factor: int, _) -> dict[str, int]:
    return {"model.depth": base.model.depth * factor}


def overrides_of_experts(base, factor: int, _) -> dict[str, int]:
    overrides = {f"{path}.experts": options.moe.experts * factor for path, options in _sizes(base, "moe")}
    if not overrides:
        raise UserError("--grow=experts is not allowed: the config has no experts")
    return overrides


SIZES: dict[str, Callable] = {
    "length": overrides_of_length,
    "width": overrides_of_width,
    "depth": overrides_of_depth,
    "experts": overrides_of_experts,
}


def grown(size: str, name: str, overrides: list[str]) -> dict[int, object]:
    """{the size: the config with it}."""
    from xfresearch.benchmarks.flags import read

    def with_changes(changes: dict):
        return read(name, [*overrides, *(f"--config.{key}={value}" for key, value in changes.items())])

    base, configs = with_changes({}), {}
    for factor in FACTORS:
        changes = SIZES[size](base, factor, with_changes)
        configs[next(iter(changes.values()))] = with_changes(changes)
    return configs


def exponent(sizes, values) -> float:
    """The slope of log(value) over log(size)."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def report(size: str, rows: list[dict]) -> dict:
    """Prints and returns the exponents of rows whose `config` is the size."""
    sizes = [row["config"] for row in rows]
    measured = exponent(sizes, [row["ms"] / row["tokens"] for row in rows])
    expected = exponent(sizes, [row["flops"] / row["tokens"] for row in rows])
    print(f"Time per token grows as {size}^{measured:.2f}; its FLOPs in closed form as {size}^{expected:.2f}.")
    return {"grow": size, "exponent": measured, "expected_exponent": expected}
