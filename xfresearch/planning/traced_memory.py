"""The memory of a traced step, for machines without its compiler: what the layers keep for the backward pass, and the most
bytes of intermediate arrays that one device holds at once.

The operations run in the order of the trace. A compiler fuses elementwise operations into those that read them, so their
results take memory only where a matrix product, a loop or another operation that cannot be fused reads them, if they stand
for several arrays (the residual stream), or if several read them and they are costly (a sigmoid). A loop holds its stacks
and what one iteration holds. Arguments and results of the whole program are not counted: the state is updated in place.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from jax.extend import core

from xfresearch.models import layers
from xfresearch.models.model_config import ModelConfig
from xfresearch.sharding.letters import row_parts

CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "shard_map"}
CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
VIEWS = {"reshape", "squeeze", "expand_dims", "sharding_constraint", "copy", "name", "optimization_barrier"}
MOVES = {"broadcast_in_dim", "transpose", "slice", "dynamic_slice", "rev", "iota", "convert_element_type", "pad"}
WHOLE = {"sort", "cumsum", "cumprod", "cummax", "cumlogsumexp", "dynamic_update_slice", "top_k"}
REDUCES = ("reduce_", "argm")
# A compiler does not compute these again for each operation that reads them.
COSTLY = {"exp", "expm1", "log", "log1p", "tanh", "logistic", "erf", "div", "sqrt", "rsqrt", "pow", "sin", "cos"}

SAME_VALUES = {"reshape", "sharding_constraint", "squeeze", "transpose", "copy", "name"}  # outputs hold the same values
WEIGHTS = "weights"  # the name of kept arrays that are a layer's weights in the dtype of the computation


@dataclass
class _Operation:
    reads: set
    writes: list  # (buffer, bytes)
    within: float = 0  # bytes that it holds while it runs
    in_place: bool = False  # whether it may write into an operand of the same size that nothing else reads


@dataclass
class _Value:
    """An array: its buffer, or the buffers that it is computed from wherever it is read."""

    size: float
    buffer: int | None = None
    roots: frozenset = frozenset()
    costly: bool = False  # whether an operation of COSTLY is among those that compute it from the buffers

    @property
    def read(self) -> frozenset:
        return self.roots if self.buffer is None else frozenset({self.buffer})


@dataclass
class _Program:
    ignored: Callable  # (shape) -> whether a fused kernel never stores such an array
    copies: bool  # whether a product of groups of rows copies the rows for each group
    operations: list[_Operation] = field(default_factory=list)
    sizes: dict[int, float] = field(default_factory=dict)

    def size(self, variable) -> float:
        aval = variable.aval
        known = hasattr(aval, "dtype") and hasattr(aval.dtype, "itemsize")
        return 0 if not known or self.ignored(aval.shape) else prod(aval.shape) * aval.dtype.itemsize

    def new(self, size: float, reads=frozenset(), within: float = 0, in_place: bool = False) -> _Value:
        """An array in a buffer, written by one operation."""
        number = len(self.sizes)
        self.sizes[number] = size
        self.operations.append(_Operation(set(reads), [number], within, in_place))
        return _Value(size, number)

    def slice(self, size: float) -> _Value:
        """A slice of a stack, copied into a buffer by the first operation that reads it."""
        number = len(self.sizes)
        self.sizes[number] = size
        return _Value(size, number)

    def stored(self, value: _Value) -> _Value:
        """The value, from now on in a buffer."""
        if value.buffer is None and value.size:
            value.buffer = self.new(value.size, value.roots).buffer
        return value

    def peak(self, kept: frozenset) -> float:
        """The most bytes at once. `kept` are read after the last operation."""
        last = {buffer: at for at, one in enumerate(self.operations) for buffer in (*one.reads, *one.writes)}
        written: set = set()
        last |= dict.fromkeys(kept, len(self.operations))
        ends: list[list] = [[] for _ in range(len(self.operations) + 1)]
        for buffer, at in last.items():
            ends[at].append(buffer)
        held = most = 0.0
        for at, one in enumerate(self.operations):
            new = {*one.reads, *one.writes} - written
            written |= new
            held += sum(self.sizes[buffer] for buffer in new)
            free = {self.sizes[buffer] for buffer in ends[at] if one.in_place and buffer not in one.writes}
            reused = sum(self.sizes[buffer] for buffer in one.writes if self.sizes[buffer] in free)
            most = max(most, held - reused + one.within)
            held -= sum(self.sizes[buffer] for buffer in ends[at])
        return most

    def run(self, jaxpr, arguments: list[_Value]) -> list[_Value]:
        """Adds the operations of a jaxpr; returns its results."""
        values = dict(zip(jaxpr.invars, arguments, strict=True))
        values |= {variable: _Value(0) for variable in jaxpr.constvars}
        uses = Counter(v for equation in jaxpr.eqns for v in equation.invars if not isinstance(v, core.Literal))

        def get(variable) -> _Value:
            return _Value(0) if isinstance(variable, core.Literal) else values[variable]

        for equation in jaxpr.eqns:
            results = self._results(equation, [get(v) for v in equation.invars], uses)
            values |= dict(zip(equation.outvars, results, strict=True))
        return [get(variable) for variable in jaxpr.outvars]

    def _results(self, equation, given: list[_Value], uses: Counter) -> list[_Value]:
        name, out = equation.primitive.name, equation.outvars
        inner = list(core.jaxprs_in_params(equation.params))
        if name in CALLS and inner:
            called = getattr(inner[0], "jaxpr", inner[0])
            return self.run(called, given[len(given) - len(called.invars) :])
        if name == "scan":
            return self._scan(equation, given)
        reads = frozenset().union(*(value.read for value in given))
        largest = max((v.aval.size for v in equation.invars if hasattr(v.aval, "size")), default=0)
        if name in VIEWS and len(out) == len(given) or (name == "transpose" and out[0].aval.ndim == 2):
            return given  # a matrix product reads a transposed matrix where it is
        plain = not inner and name not in WHOLE and largest <= out[0].aval.size
        if name in MOVES or (plain and _elementwise(equation)):
            costly = name in COSTLY or any(each.costly and each.buffer is None for each in given)
            value = _Value(self.size(out[0]), None, reads, costly)
            several = sum(self.sizes[buffer] for buffer in reads) >= 2 * value.size
            kept = uses[out[0]] > 1 and (several or costly)
            return [self.stored(value) if kept else value, *(_Value(0) for _ in out[1:])]
        if not name.startswith(REDUCES):
            reads = frozenset().union(*(self.stored(value).read for value in given))
        within = max((peak(getattr(each, "jaxpr", each), self.ignored, self.copies) for each in inner), default=0)
        if name == "ragged_dot_general" and self.copies:
            within = _copies_of_rows(equation)
        in_place = name.startswith(("scatter", "dynamic_update"))
        return [self.new(self.size(v), reads, within if i == 0 else 0, in_place) for i, v in enumerate(out)]

    def _scan(self, equation, given: list[_Value]) -> list[_Value]:
        """The carry keeps its buffer. Stacks of results are new."""
        consts, carries = _counts(equation)
        body = equation.params["jaxpr"].jaxpr
        reads = frozenset().union(*(self.stored(value).read for value in given))
        slices = [_Value(0)] * (consts + carries)
        inside = _Program(self.ignored, self.copies)
        slices += [inside.slice(inside.size(variable)) for variable in body.invars[consts + carries :]]
        results = [inside.stored(value) for value in inside.run(body, slices)[:carries]]
        within = inside.peak(frozenset().union(*(value.read for value in results)))
        stacks = [self.new(self.size(variable)) for variable in equation.outvars[carries:]]
        self.operations.append(_Operation(set(reads) | {s.buffer for s in stacks}, [], within))
        return [*(_Value(v.size, v.buffer, v.roots) for v in given[consts : consts + carries]), *stacks]


def _copies_of_rows(equation) -> float:
    """Bytes that XLA on a CPU or GPU holds for jax.lax.ragged_dot, a dense product of rows that are 0 in all groups but
    their own: a copy for each group of the rows, and of it another one in the order that the product reads; or of both
    operands, if the rows are summed (a gradient of the matrices)."""
    rows, matrices, groups = (variable.aval for variable in equation.invars[:3])
    operands = (rows, matrices) if rows.ndim == matrices.ndim else (rows, rows)
    return groups.shape[-1] * sum(each.size * each.dtype.itemsize for each in operands)


def _elementwise(equation) -> bool:
    """Whether each number of the result depends on one number of each operand, whose dimensions may be 1."""
    shape = equation.outvars[0].aval.shape
    given = [v.aval.shape for v in equation.invars if hasattr(v.aval, "shape")]
    return all(not each or len(each) == len(shape) and all(d in (1, n) for d, n in zip(each, shape)) for each in given)  # noqa: B905


def _counts(equation) -> tuple[int, int]:
    """The numbers of constants and of carried values of a scan."""
    body = equation.params["jaxpr"].jaxpr
    carries = len(equation.outvars) - len(_stacked(body.outvars, equation.outvars))
    return len(equation.invars) - len(_stacked(body.invars, equation.invars)) - carries, carries


def _stacked(inside, outside) -> list[tuple]:
    """(inside, outside) variables of the stacks that a scan reads or writes, which have one dimension more outside. Compares
    dimensions because the parameters of a scan have other names from JAX 0.12 on."""
    return [pair for pair in zip(inside, outside, strict=True) if pair[1].aval.ndim == pair[0].aval.ndim + 1]


def peak(jaxpr, ignored: Callable = lambda shape: False, copies: bool = False) -> float:
    """The most bytes of intermediate arrays at once. `ignored(shape)`: arrays that a fused kernel never stores. `copies`:
    whether jax.lax.ragged_dot copies rows, as it does on CPUs and GPUs."""
    program = _Program(ignored, copies)
    program.run(jaxpr, [_Value(0) for _ in jaxpr.invars])
    return program.peak(frozenset())


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
    stacked = _stacked(inner.outvars, scan.outvars)
    outsides = {outside for _, outside in stacked}
    carried = [variable for variable in scan.outvars if variable not in outsides]
    width = max(carried, key=lambda v: v.aval.size).aval.shape[-1]
    made = {out: equation for equation in inner.eqns for out in equation.outvars}
    slices = {slice for slice, _ in _stacked(inner.invars, scan.invars)}
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


def _first_scans(jaxpr, lengths: list[int]) -> list:
    """The first scan of each length with stacked outputs, after that of the length before; a scan over microbatches has
    none, because it only sums."""
    found: list = []
    for equation in jaxpr.eqns if lengths else ():
        scan = equation.primitive.name == "scan" and equation.params["length"] == lengths[len(found)]
        if scan and _stacked(equation.params["jaxpr"].jaxpr.outvars, equation.outvars):
            found.append(equation)
        else:
            for inner in core.jaxprs_in_params(equation.params):
                found += _first_scans(getattr(inner, "jaxpr", inner), lengths[len(found) :])
        if len(found) == len(lengths):
            break
    return found
