"""Functions whose equality is that of their computation, so that equal ones share a compiled program.

Two lambdas are never equal for jax.jit, which would compile a pass for each. A traced function holds its operations, and
the arrays that it uses from outside (also traced ones, of jax.grad or jax.vmap) become its arguments.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from xfresearch.models.taps import Patch


class Traced:
    """A pure function of one array and of the arrays that it uses from outside."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        # The text has all operations with their settings, but not the code of custom derivatives and callbacks.
        self.text = None if any(map(callable, settings(jaxpr))) else str(jaxpr)

    def __call__(self, x, *outside):
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, outside))(x)[0]

    def __eq__(self, other) -> bool:
        return self is other or isinstance(other, Traced) and self.text is not None and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text or id(self))


def traced(patch: Patch, value: jax.ShapeDtypeStruct) -> Patch:
    """A patch of values of this shape and dtype, whose function has no arguments, with a traced function."""
    closed = jax.make_jaxpr(lambda x: patch.function(x))(value)  # a new lambda: JAX would not trace the same one again
    return replace(patch, function=Traced(closed.jaxpr), arguments=tuple(map(jnp.asarray, closed.consts)))


def settings(jaxpr) -> Iterator:
    """The settings of all operations of a jaxpr, also of those inside them."""
    for operation in jaxpr.eqns:
        for value in operation.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(each, "jaxpr", each)  # of a ClosedJaxpr
                if hasattr(inner, "eqns"):
                    yield from settings(inner)
                else:
                    yield each
