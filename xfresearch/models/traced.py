"""Functions that are equal if they compute the same, so that equal functions share a compiled program.

Two lambdas are never equal for jax.jit, which would compile a pass for each. A traced function holds its operations. Arrays
that it closes over (also traced ones, of jax.grad or jax.vmap) become its arguments, except those that a jitted function
inside it closes over: these stay part of the operations.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from xfresearch.models.taps import Patch


class Traced:
    """A pure function of one array and of the arrays that it closes over."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.key = key(jaxpr)

    def __call__(self, x, *outside):
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, outside))(x)[0]

    def __eq__(self, other) -> bool:
        return self is other or isinstance(other, Traced) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def traced(patch: Patch, value: jax.ShapeDtypeStruct) -> Patch:
    """A patch of values of this shape and dtype, whose function has no arguments, with a traced function."""
    closed = jax.make_jaxpr(lambda x: patch.function(x))(value)  # a new lambda: JAX would not trace the same one again
    return replace(patch, function=Traced(closed.jaxpr), arguments=tuple(map(jnp.asarray, closed.consts)))


def key(jaxpr: Jaxpr) -> tuple:
    """Equal for jaxprs with the same computation, as long as they exist.

    The text has the operations, but not what is in their arrays, their meshes, and their Python functions, such as custom
    derivatives and callbacks. A Python function is equal to itself only."""
    return str(jaxpr), *map(_identity, settings(jaxpr))


def _identity(setting):
    """A setting of an operation, or its id if it has no hash."""
    if hasattr(setting, "__array__") and not isinstance(setting, jax.Array | type):
        return np.asarray(setting).tobytes()
    try:
        hash(setting)
    except TypeError:
        return id(setting)  # a jax.Array never changes, and may be on devices of other processes
    return setting


def settings(jaxpr) -> Iterator:
    """The settings of all operations of a jaxpr, also of those inside them, and the arrays inside them."""
    for operation in jaxpr.eqns:
        yield from (each.val for each in operation.invars if isinstance(each, Literal) and np.ndim(each.val))
        for value in operation.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(each, "jaxpr", each)  # of a ClosedJaxpr
                if hasattr(inner, "eqns"):
                    yield from getattr(each, "consts", ())
                    yield from settings(inner)
                else:
                    yield each
