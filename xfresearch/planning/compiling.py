"""Traces and compiles the real training step of a config, for devices that may be absent, and reads what the compiler says
of its memory."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xfresearch.planning.chips import GIB
from xfresearch.planning.hlo import Computation, Program, parse
from xfresearch.run_config.config import Config
from xfresearch.run_config.resolving import with_vocabulary
from xfresearch.runtime.errors import require
from xfresearch.runtime.files import write_text

FILLS = {"parameter", "constant", "broadcast", "bitcast"}  # a fusion of only these fills an array with one number
# The TPU compiler rejects a program that needs too much memory with one of two messages.
NEEDS = re.compile(r"temporaries \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)")
USED = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
ALLOCATION = re.compile(r"Size: ([\d.]+)([KMGT])(.*?)(?=\n\s*\d+\. Size|\Z)", re.S)
SCALE = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """A compiled step: its program, and the sizes that the compiler reports, in bytes per device."""

    program: Program
    arguments: float
    temporary: float
    code: float
    outputs: float  # without those that reuse the memory of an argument
    seconds: float  # to lower and compile


@dataclass(frozen=True)
class OutOfMemory:
    """A step that needs more memory than the device has: bytes, and the largest allocations that the compiler lists."""

    needed: float
    available: float
    largest: list
    seconds: float


def prepare(config: Config) -> Config:
    """Sets the config's vocabulary size without reading any text. Raises UserError if param_dtype is float64, or the
    vocabulary is too small. A tokenizer's file is read only for a config without a size: it may not be on this machine."""
    from xfresearch.data.labels import trains_on_labels
    from xfresearch.data.tokenizers import vocab_size

    allowed = "float32 in a plan, because these chips are not designed for float64"
    require(config.model.param_dtype == "float32", "model.param_dtype", config.model.param_dtype, allowed)
    given = config.model.vocab_size
    known = given and (config.data.tokenizer not in ("bytes", "bpe") or trains_on_labels(config.data))
    return with_vocabulary(config, given if known else vocab_size(config.data))


def trace(config: Config, mesh):
    """(abstract state, the step traced on `mesh`), exactly as in a training run."""
    from xfresearch.training.program import Program

    program = Program(config, mesh)
    return program.abstract_state, program.jit_update.trace(program.abstract_state, program.abstract_batch)


def compile_step(traced, text_file: str = "", options: Mapping | None = None) -> Compiled | OutOfMemory:
    """Compiles the traced step for its mesh's devices, with `options` of XLA; writes the program's text to `text_file`.

    Compiler errors other than out of memory are raised unchanged.
    """
    import jax

    began = time.perf_counter()
    try:
        compiled = traced.lower().compile(options)
    except jax.errors.JaxRuntimeError as error:
        sizes = parse_out_of_memory(str(error))
        if sizes is None:
            raise
        return OutOfMemory(*sizes, time.perf_counter() - began)
    sizes = compiled.memory_analysis()
    text = compiled.as_text()
    if text_file:
        write_text(text_file, text)
    return Compiled(
        program=parse(text),
        arguments=sizes.argument_size_in_bytes,
        temporary=sizes.temp_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
        outputs=max(sizes.output_size_in_bytes - sizes.alias_size_in_bytes, 0),
        seconds=time.perf_counter() - began,
    )


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


def traced_flops(config: Config) -> int:
    """FLOPs of all matrix products of one step, counted in the traced program; loops count once per iteration.

    Uses the plain kernels, whose products are visible: causal attention counts in full, each token's experts once.
    """
    from xfresearch.models.counting import count_flops

    return count_flops(*_unsharded_step(with_plain_kernels(config)))


def trace_unsharded(config: Config):
    """The step of a config, traced without a mesh."""
    import jax

    step, *arguments = _unsharded_step(config)
    return jax.make_jaxpr(step)(*arguments)


def _unsharded_step(config: Config) -> tuple:
    """(step, abstract state, abstract batch) for one device, with scanned layers."""
    from xfresearch.training.program import Program, batch_shapes

    program = Program(replace(config, training=replace(config.training, layers="scan")))
    return program.update, program.shapes, batch_shapes(config)


def with_plain_kernels(config: Config) -> Config:
    return replace(config, training=replace(config.training, attention_kernel="plain", expert_kernel="ragged"))
