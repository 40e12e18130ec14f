"""Which options of execution are the fastest for a config on this machine: one option after the other, each value beside the
best so far."""

from dataclasses import replace

from xfresearch.errors import UserError

LEAST_GAIN = 1.01  # a value must be this much faster, in the median and in three quarters of the rounds faster at all


def sweep(config, rounds: int, measured, timers) -> tuple[list[dict], dict]:
    """Prints what each value does. Returns the rows, and {option: the value to use} where another one is faster than the
    config's. `measured(starts, rounds, apart)` times; `timers(config)` starts a row."""
    from xfresearch.sharding.mesh import make_mesh
    from xfresearch.training.kernel_choices import choices

    rows, best = [], {}
    for key, values in choices(config, make_mesh(config)).items():
        for value in values:
            now = _with(config, best)
            if _value(now, key) == value:
                continue
            row = {"option": key, "value": value, **_compared(now, _with(now, {key: value}), rounds, measured, timers)}
            rows.append(row)
            chosen = not row["error"] and row["speed"] >= LEAST_GAIN and row["speed_low"] > 1
            if chosen:
                best[key] = value
            print(f"{key}={value:<10} {row['error'] or _speed(row)}{'  <- chosen' if chosen else ''}", flush=True)
    words = " ".join(f"--config.{key}={value}" for key, value in best.items())
    print(f"Use: {words}" if best else "Nothing is faster than the config as it is.")
    return rows, best


def _speed(row: dict) -> str:
    return f"{row['speed']:.3f} times as fast ({row['speed_low']:.3f} to {row['speed_high']:.3f}), {row['GB']:.2f} GB"


def _compared(now, other, rounds: int, measured, timers) -> dict:
    """How often `other` is as fast as `now`, or why it does not run."""
    import jax

    try:
        _, row = measured({"now": timers(now), "other": timers(other)}, rounds, False)
    except (UserError, jax.errors.JaxRuntimeError) as error:
        return {"error": (str(error).strip().splitlines() or [type(error).__name__])[0][:160]}
    found = {"speed": row["ratio"], "speed_low": row["ratio_low"], "speed_high": row["ratio_high"]}
    return {"error": "", **found, "GB": row["memory_bytes"] / 1e9}


def _with(config, values: dict):
    changes = {key.split(".")[1]: value for key, value in values.items()}
    return replace(config, training=replace(config.training, **changes))


def _value(config, key: str):
    return getattr(config.training, key.split(".")[1])
