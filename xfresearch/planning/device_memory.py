"""Memory per device: the largest arrays of the state, and the bytes that the compiled program adds."""

import re

import jax

from xfresearch.models import layers
from xfresearch.models.model_config import ModelConfig
from xfresearch.planning.chips import GIB
from xfresearch.planning.hlo import Computation, Program
from xfresearch.runtime.trees import path_name
from xfresearch.sharding.capacity import shard_bytes
from xfresearch.sharding.letters import row_parts

SAME_VALUES = {"reshape", "sharding_constraint", "squeeze", "transpose", "copy", "name"}  # outputs hold the same values
WEIGHTS = "weights"  # the name of kept arrays that are a layer's weights in the dtype of the computation
FILLS = {"parameter", "constant", "broadcast", "bitcast"}  # a fusion of only these fills an array with one number


def largest_of_state(state, count: int) -> list[tuple[str, str, int]]:
    """(name, global shape, bytes per device) of the largest arrays of the training state."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    rows = [(path_name(path), f"{leaf.dtype}{list(leaf.shape)}", shard_bytes(leaf)) for path, leaf in flat]
    return sorted(rows, key=lambda row: -row[2])[:count]


def kept_activations(program: Program) -> list[tuple[str, str, float]]:
    """(operation, shape, bytes per device) of the activations that forward loops save for the backward pass.

    These are the arrays that a forward loop carries and that are empty buffers before the loop.
    """
    arrays = []
    for name in program.runs():
        computation = program.computations[name]
        for loop in computation.instructions.values():
            if loop.opcode != "while" or "transpose(" in loop.op_name or "jvp" not in loop.op_name:
                continue
            start = computation.instructions[loop.operands[0]]
            trips = program.trip_count(computation, loop)
            for operand, array in zip(start.operands, loop.outputs, strict=False):
                stacked = array.shape[:1] == (trips,) and len(array.shape) > 1
                if stacked and _is_empty_buffer(program, computation, operand):
                    arrays.append((loop.op_name, f"{array.dtype}{list(array.shape)}", array.bytes))
    return sorted(arrays, key=lambda row: -row[2])


def _is_empty_buffer(program: Program, computation: Computation, name: str) -> bool:
    """Whether an array has no content yet: it is uninitialized, or filled with one number."""
    made = computation.instructions.get(name)
    if made is None:
        return False
    if fused := program.fused(made):
        return {inner.opcode for inner in fused.instructions.values()} <= FILLS
    if made.opcode in ("copy", "bitcast"):
        return _is_empty_buffer(program, computation, made.operands[0])
    return made.opcode == "broadcast" or '"AllocateBuffer"' in made.text


# The TPU compiler rejects a program that needs too much memory with one of two messages.
NEEDS = re.compile(r"temporaries \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)")
USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
ALLOCATION = re.compile(r"Size: ([\d.]+)([KMGT])(.*?)(?=\n\s*\d+\. Size|\Z)", re.S)
SCALE = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


def parse_out_of_memory(text: str) -> tuple[float, float, list[tuple[str, str, float]]] | None:
    """(needed, available, largest allocations) in bytes from a compiler's out-of-memory error, or None."""
    found = NEEDS.search(text) or USED.search(text)
    if "RESOURCE_EXHAUSTED" not in text or not found:
        return None
    needed, available = (float(found[i]) * SCALE[found[i + 1]] for i in (1, 3))
    largest = []
    for size, unit, rest in ALLOCATION.findall(text):
        source = re.search(r'op_name="([^"]*)"', rest)
        shape = re.search(r"Shape: (\S+?)\{", rest)
        largest.append((source[1] if source else "", shape[1] if shape else "", float(size) * SCALE[unit]))
    return needed, available, largest


def repeats_of_stacks(model: ModelConfig) -> list[int]:
    """The number of layers that one scan goes over in each stack, in the order of computation."""
    return [layers.most_repeats(stack) for stack in model.all_stacks]


def kept_in_trace(jaxpr, repeats: list[int], mesh: dict[str, int]) -> list[tuple[str, str, float]]:
    """(operation, global shape, bytes per device) of the activations that the scans over layers save. `repeats` has the
    number of layers of each stack, in the order of computation.

    Used if the step does not compile, or if there is no compiler. The arrays are sharded over the axes of the batch;
    all but the residual stream also over `tensor`.
    """
    arrays = [row for scan in _first_scans(jaxpr, repeats) for row in _kept(scan, mesh)]
    return sorted(arrays, key=lambda row: -row[2])


def _kept(scan, mesh: dict[str, int]) -> list[tuple[str, str, float]]:
    inner = scan.params["jaxpr"].jaxpr
    stacked = _stacked(scan)
    outsides = {outside for _, outside in stacked}
    carried = [variable for variable in scan.outvars if variable not in outsides]
    width = max(carried, key=lambda v: v.aval.size).aval.shape[-1]
    made = {out: equation for equation in inner.eqns for out in equation.outvars}
    slices = {v for v, o in zip(inner.invars, scan.invars, strict=True) if o.aval.ndim == v.aval.ndim + 1}
    arrays = []
    seen = set()
    for inside, outside in stacked:
        aval = outside.aval
        while inside in made and made[inside].primitive.name in SAME_VALUES:
            inside = made[inside].invars[0]
        if inside in seen:  # the compiler stores equal values once
            continue
        seen.add(inside)
        name = made[inside].primitive.name if inside in made else "input"
        if name == "convert_element_type" and made[inside].invars[0] in slices:
            name, parts = WEIGHTS, mesh["fsdp"] * mesh["tensor"]
        else:
            parts = row_parts(mesh) * mesh["context"] * (mesh["tensor"] if aval.shape[-1] != width else 1)
        arrays.append((name, f"{aval.dtype}{list(aval.shape)}", aval.size * aval.dtype.itemsize / parts))
    return arrays


def _stacked(scan) -> list[tuple]:
    """(inside, outside) variables of a scan's stacked outputs, which have one dimension more outside.

    Compares dimensions because the parameter that counts carried values has another name from JAX 0.12 on.
    """
    pairs = zip(scan.params["jaxpr"].jaxpr.outvars, scan.outvars, strict=True)
    return [(inside, outside) for inside, outside in pairs if outside.aval.ndim == inside.aval.ndim + 1]


def _first_scans(jaxpr, lengths: list[int]) -> list:
    """The first scan of each length with stacked outputs, after that of the length before; a scan over microbatches has
    none, because it only sums."""
    from jax.extend import core

    found: list = []
    for equation in jaxpr.eqns if lengths else ():
        scan = equation.primitive.name == "scan" and equation.params["length"] == lengths[len(found)]
        if scan and _stacked(equation):
            found.append(equation)
        else:
            for inner in core.jaxprs_in_params(equation.params):
                found += _first_scans(getattr(inner, "jaxpr", inner), lengths[len(found) :])
        if len(found) == len(lengths):
            break
    return found
