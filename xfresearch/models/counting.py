"""Counts the FLOPs of a traced program. The tests compare the closed forms in `costs.py` with them.

Convention: 2 per multiply-add of every matrix product and convolution, including results that a mask discards and the
padding of a convolution. A ragged product counts each row once, for the group that it belongs to. Everything else
(elementwise operations, softmax, norms, sorting, gathering) counts 0.
"""

import math

import jax
from jax.extend import core

CALLED_ONCE = {
    "pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
}  # fmt: skip


def count_flops(fn, *abstract_args) -> int:
    """FLOPs of fn(*abstract_args), which is traced from arrays or jax.ShapeDtypeStruct and not computed.

    A conditional counts its most expensive branch. Raises ValueError if the program does not determine the number of
    matrix products: inside a while loop, a shard_map or a custom kernel (count its plain implementation instead).
    """
    return count_jaxpr(jax.make_jaxpr(fn)(*abstract_args).jaxpr)


def count_jaxpr(jaxpr) -> int:
    """FLOPs of a traced program, as in `count_flops`."""
    return sum(_equation(equation) for equation in jaxpr.eqns)


def _equation(equation) -> int:
    name = equation.primitive.name
    if name in PRODUCTS:
        return PRODUCTS[name](equation)
    inner = [count_jaxpr(_open(jaxpr)) for jaxpr in core.jaxprs_in_params(equation.params)]
    if name == "scan":
        return equation.params["length"] * sum(inner)
    if name == "cond":
        return max(inner)
    if any(inner) and name not in CALLED_ONCE or name in ("pallas_call", "tpu_custom_call", "ffi_call"):
        raise ValueError(f"count_flops cannot count '{name}': its number of matrix products is unknown")
    return sum(inner)


def _open(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


def _shapes(equation):
    return [math.prod(v.aval.shape) for v in equation.outvars], *(v.aval.shape for v in equation.invars[:2])


def _dot(equation) -> int:
    (size,), lhs, _ = _shapes(equation)
    (contracted, _), _ = equation.params["dimension_numbers"]
    return 2 * size * math.prod(lhs[i] for i in contracted)


def _ragged_dot(equation) -> int:
    """Each element of the left operand is multiplied with every free column of the right one once, whichever dimension
    is ragged."""
    _, lhs, rhs = _shapes(equation)
    dims = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = dims.dot_dimension_numbers
    taken = {*contracted, *batch, *dims.rhs_group_dimensions}
    return 2 * math.prod(lhs) * math.prod(n for i, n in enumerate(rhs) if i not in taken)


def _convolution(equation) -> int:
    """2 for each output, kernel position and input feature of the output's group."""
    (size,), _, rhs = _shapes(equation)
    features = rhs[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * size * math.prod(rhs) // features


PRODUCTS = {
    "dot_general": _dot,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}
