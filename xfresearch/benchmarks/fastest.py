"""Which options of execution are the fastest for a config on this machine: one option after the other, each value beside the
best so far."""

from dataclasses import replace

from xfresearch.runtime.errors import UserError

LEAST_GAIN = 1.01  # a value must be this much faster, in the median and in three quarters of the rounds faster at all


def sweep(config, rounds: int, measured, timers) -> tuple[list[dict], dict]:
    """Prints the speed of each value. Returns the rows, and {option: the value to use} if these values together are faster
    than the config as it is. `measured(starts, rounds, apart)` times rows; `timers(config)` starts a row."""
    from xfresearch.sharding.mesh import make_mesh
    from xfresearch.training.kernel_choices import choices

    rows: list[dict] = []
    best: dict = {}
    mesh = make_mesh(config)
    for key, values in choices(config, mesh).items():
        for value in values:
            now, other = _with(config, best), _with(config, best | {key: value})
            if _computed(now, mesh) == _computed(other, mesh):
                continue
            row = {"option": key, "value": value, **_compared(now, other, rounds, measured, timers)}
            rows.append(row)
            if _faster(row):
                best[key] = value
            print(f"{key}={value:<10} {_speed(row)}{'  <- chosen' if _faster(row) else ''}", flush=True)
    if best:
        last = {"option": "all together", "value": "", **_compared(config, _with(config, best), rounds, measured, timers)}
        rows.append(last)
        print(f"all together: {_speed(last)}")
        best = best if _faster(last) else {}
    words = " ".join(f"--config.{key}={value}" for key, value in best.items())
    print(f"Use: {words}" if best else "Nothing is faster than the config as it is.")
    return rows, best


def _computed(config, mesh) -> tuple:
    """The choices that the options of execution lead to: `auto` may be the same as a value by name."""
    from xfresearch.training.kernel_choices import kernel_choices, layers_choice, loss_rows_choice

    kernels = {place: choice.name for place, choice in kernel_choices(config, mesh).items()}
    return layers_choice(config, mesh).name, loss_rows_choice(config, mesh).name, kernels, config.training.remat


def _faster(row: dict) -> bool:
    return not row["error"] and row["speed"] >= LEAST_GAIN and row["speed_low"] > 1


def _speed(row: dict) -> str:
    if row["error"]:
        return row["error"]
    return f"{row['speed']:.3f} times as fast ({row['speed_low']:.3f} to {row['speed_high']:.3f}), {row['GB']:.2f} GB"


def _compared(now, other, rounds: int, measured, timers) -> dict:
    """How often `other` is as fast as `now`, or why it does not run."""
    import jax

    try:
        _, row = measured({"now": timers(now), "other": timers(other)}, rounds, False)
    except (UserError, jax.errors.JaxRuntimeError) as error:
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0][:160]}
    figures = {"speed": row["ratio"], "speed_low": row["ratio_low"], "speed_high": row["ratio_high"]}
    return {"error": "", **figures, "GB": row["memory_bytes"] / 1e9}


def _with(config, values: dict):
    changes = {key.split(".")[1]: value for key, value in values.items()}
    return replace(config, training=replace(config.training, **changes))
