"""Implementations of one function of arrays, side by side: forward pass, forward and backward pass, and their floor.

Every round calls each implementation once, so that a busy machine slows all of them equally. A figure is the fastest
round. The floor is the time that the operation's matrix products would take at the rate of one large product, which is
measured in the same run.
"""

import time

from xfresearch.benchmarks.flags import add_json, add_sizes, write_figures

FLOOR = "floor"
FLOOR_SIZE = 1536  # rows and columns of both matrices of the large product


def add_flags(parser, sizes: dict[str, int]) -> None:
    add_sizes(parser, sizes)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    add_sizes(parser, {"rounds": 15})
    add_json(parser)


def run(options, prepare) -> None:
    """Prints a row of figures per implementation. `prepare(options, draw)` returns {name: function}, the arguments of all of
    them, and the FLOPs of a forward pass; `draw(*shape)` returns random numbers."""
    import jax
    import numpy as np

    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jax.numpy.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, options.dtype)

    functions, inputs, flops = prepare(options, draw)
    rows = compare(functions, inputs, flops, draw(FLOOR_SIZE, FLOOR_SIZE), options.rounds)
    print(f"{'':14}{'forward ms':>12}{'speed-up':>10}{'floors':>8}{'+backward ms':>14}{'speed-up':>10}{'floors':>8}")
    for row in rows:
        cells = [row["implementation"].ljust(14)]
        for phase, width in (("forward", 12), ("forward+backward", 14)):
            figures = row[phase]
            cells.append(f"{figures['ms']:{width}.2f}{figures['ratio']:10.2f}{figures['floors']:8.2f}")
        print("".join(cells))
    write_figures(options, {"flops": flops, "rows": rows})


def forward_and_backward(function):
    import jax
    import jax.numpy as jnp

    def both(*arguments):
        outputs, vjp = jax.vjp(function, *arguments)
        return outputs, vjp(jnp.ones_like(outputs))

    return both


def fastest(functions: dict, arguments, rounds: int) -> dict:
    """{name: seconds} of the fastest of `rounds` calls of each function. Every round calls each function once."""
    import jax

    compiled = {name: jax.jit(function) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for call in range(rounds + 1):
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments[name]))
            if call:  # the first call compiles
                times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def compare(functions: dict, arguments, flops: float, square, rounds: int) -> list[dict]:
    """A row of figures for every implementation and the floor, for the forward pass and for forward and backward
    together (three times the FLOPs)."""
    table: dict = {}
    for phase, factor in (("forward", 1), ("forward+backward", 3)):
        wrapped = functions if factor == 1 else {name: forward_and_backward(f) for name, f in functions.items()}
        each = dict.fromkeys(functions, arguments) | {FLOOR: (square, square)}
        times = fastest(wrapped | {FLOOR: lambda a, b: a @ b}, each, rounds)
        times[FLOOR] *= factor * flops / (2 * square.shape[0] ** 3)
        first = times[next(iter(functions))]
        for name, seconds in times.items():
            table.setdefault(name, {"implementation": name})[phase] = {
                "ms": seconds * 1e3,
                "ratio": first / seconds,
                "floors": seconds / times[FLOOR],
            }
    return list(table.values())
