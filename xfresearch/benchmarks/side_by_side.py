"""Implementations of one function of arrays, side by side: forward pass, forward and backward pass, and their floor.

A figure is the fastest round. The floor is the time that the operation's matrix products would take at the rate of one
large product, which is measured in the same run.
"""

from collections.abc import Callable
from functools import partial

from xfresearch.benchmarks.flags import add_json, add_sizes, write_figures
from xfresearch.benchmarks.rounds import in_rounds, print_table, seconds_of

FLOOR = "floor"
FLOOR_SIZE = 1536  # rows and columns of both matrices of the large product
COLUMNS = {"": "{implementation}"} | {
    f"{sign}{title}": f"{{{phase}[{figure}]:.2f}}"
    for phase, sign, titles in (
        ("forward", "", ("forward ms", "speed-up", "floors")),
        ("forward+backward", "+", ("backward ms", "speed-up", "floors")),
    )
    for title, figure in zip(titles, ("ms", "ratio", "floors"), strict=True)
}


class SideBySide:
    """An operation of the command: what `prepare` returns for these sizes (kernels.py)."""

    def __init__(self, prepare: Callable, sizes: dict[str, int], add_more: Callable = lambda parser: None):
        self.prepare, self.sizes, self.add_more = prepare, sizes, add_more
        self.__doc__ = prepare.__doc__

    def add_flags(self, parser) -> None:
        add_sizes(parser, self.sizes)
        parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
        add_sizes(parser, {"rounds": 15})
        add_json(parser)
        self.add_more(parser)

    def run(self, options) -> None:
        """Prints a row of figures per implementation."""
        import jax
        import numpy as np

        if options.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        rng = np.random.default_rng(0)

        def draw(*shape):
            return jax.numpy.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, options.dtype)

        functions, inputs, flops = self.prepare(options, draw)
        rows = compare(functions, inputs, flops, draw(FLOOR_SIZE, FLOOR_SIZE), options.rounds)
        print_table(COLUMNS, rows)
        write_figures(options, {"flops": flops, "rows": rows})


def forward_and_backward(function):
    import jax
    import jax.numpy as jnp

    def both(*arguments):
        outputs, vjp = jax.vjp(function, *arguments)
        return outputs, vjp(jnp.ones_like(outputs))

    return both


def compare(functions: dict, arguments, flops: float, square, rounds: int) -> list[dict]:
    """A row of figures for every implementation and the floor, for the forward pass and for forward and backward
    together (three times the FLOPs)."""
    import jax

    table: dict = {}
    floor = partial(seconds_of, jax.jit(lambda a, b: a @ b), square, square)
    for phase, factor in (("forward", 1), ("forward+backward", 3)):
        wrapped = functions if factor == 1 else {name: forward_and_backward(f) for name, f in functions.items()}
        calls = {name: partial(seconds_of, jax.jit(function), *arguments) for name, function in wrapped.items()}
        seconds = in_rounds(calls | {FLOOR: floor}, rounds, untimed=1)  # the first call compiles
        times = {name: min(each) for name, each in seconds.items()}
        times[FLOOR] *= factor * flops / (2 * square.shape[0] ** 3)
        first = times[next(iter(functions))]
        for name, own in times.items():
            figures = {"ms": own * 1e3, "ratio": first / own, "floors": own / times[FLOOR]}
            table.setdefault(name, {"implementation": name})[phase] = figures
    return list(table.values())
