"""Traces and compiles the real training step of a config, for devices that may be absent."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from xfresearch.planning import device_memory, hlo
from xfresearch.run_config.config import Config
from xfresearch.run_config.resolving import with_vocabulary
from xfresearch.runtime.errors import require
from xfresearch.runtime.files import write_text


@dataclass(frozen=True)
class Compiled:
    """A compiled step: its program, and the sizes that the compiler reports, in bytes per device."""

    program: hlo.Program
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
        sizes = device_memory.parse_out_of_memory(str(error))
        if sizes is None:
            raise
        return OutOfMemory(*sizes, time.perf_counter() - began)
    sizes = compiled.memory_analysis()
    text = compiled.as_text()
    if text_file:
        write_text(text_file, text)
    return Compiled(
        program=hlo.parse(text),
        arguments=sizes.argument_size_in_bytes,
        temporary=sizes.temp_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
        outputs=max(sizes.output_size_in_bytes - sizes.alias_size_in_bytes, 0),
        seconds=time.perf_counter() - began,
    )


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
