"""A sublayer of a block, as the references of the layouts (tests/variants/) see it."""

from collections.abc import Callable

from tests.reference.records import at, record


class Part:
    """`y` is what the sublayer adds to the stream."""

    def __init__(self, name: str, function: Callable):
        self.name, self.function, self.y = name, function, 0.0

    def __call__(self, x, h, after: Callable = lambda y: y):
        """after(function(h)), with the stream x at this point: what it reads, a norm of it, or something else."""
        with at(self.name):
            record("before", x)
            self.y = record("out", after(record("raw", self.function(record("in", h)))))
        return self.y

    def end(self, x, norm: Callable | None = None):
        """The stream after the sublayer, with a norm of the sum x."""
        with at(self.name):
            return record("residual", x if norm is None else norm(record("sum", x)))

    def carries(self, name: str, value):
        """A value that travels with the stream, after the sublayer."""
        with at(self.name):
            return record(name, value)
