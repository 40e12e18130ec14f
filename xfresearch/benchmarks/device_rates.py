"""What a device can do at most: FLOPs per second of matrix products, and bytes per second of its memory."""

from dataclasses import dataclass
from functools import cache

from xfresearch.benchmarks.rounds import seconds_of

ROWS = {"cpu": 1536}  # rows and columns of both matrices of the large product, by platform
MANY_ROWS = 8192
BYTES = 2**28  # that the large copy reads, and writes again
CALLS = 5


@dataclass(frozen=True)
class Rates:
    """flops, bytes: per second. The texts say where each comes from."""

    flops: float
    flops_source: str
    bytes: float
    bytes_source: str


def peak_or_measured(dtype: str) -> tuple[float, str]:
    """FLOP/s of all devices in matrix products of `dtype`, and where the number comes from: the data sheet of the device, or
    if it has none (a CPU) the rate of one large product, measured now."""
    import jax

    from xfresearch.runtime.hardware import peak_flops

    device = jax.devices()[0]
    known = peak_flops(device.device_kind, dtype)
    if known:
        return known * jax.device_count(), f"the data sheet's {known / 1e12:.0f} TFLOP/s of {device.device_kind}"
    rate, rows = product_rate(dtype)
    return (
        rate * jax.device_count(),
        f"{rate / 1e9:.0f} GFLOP/s, one {dtype} product of {rows} rows and columns, measured now",
    )


@cache
def product_rate(dtype: str) -> tuple[float, int]:
    """FLOP/s of one large matrix product on this device, and its rows and columns."""
    import jax
    import jax.numpy as jnp

    rows = ROWS.get(jax.default_backend(), MANY_ROWS)
    x = jnp.ones((rows, rows), dtype)
    return 2 * rows**3 / _fastest(jax.jit(lambda x: x @ x), x), rows


@cache
def read_rate() -> float:
    """Bytes per second that this device reads in the product of one large matrix and a vector."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((BYTES // 4096, 1024), jnp.float32)
    return BYTES / _fastest(jax.jit(lambda matrix: matrix @ matrix[0]), matrix)


@cache
def copy_rate() -> float:
    """Bytes per second that this device reads and writes in one large elementwise operation."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(BYTES // 4, jnp.float32)
    return 2 * BYTES / _fastest(jax.jit(lambda x: x + 1), x)


def rates(dtype: str) -> Rates:
    """The rates of the floors of operations (operations.py). Bytes per second are measured."""
    flops, source = peak_or_measured(dtype)
    bytes_per_second = copy_rate()
    return Rates(flops, source, bytes_per_second, f"{bytes_per_second / 1e9:.0f} GB/s, one large copy, measured now")


def _fastest(function, x) -> float:
    return min(seconds_of(function, x) for _ in range(CALLS + 1))  # the first call compiles
