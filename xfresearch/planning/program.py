"""The real training step of a config, compiled for devices that need not be there, and what its program says."""

import time
from dataclasses import dataclass, replace

from xfresearch.config.run import Config
from xfresearch.errors import require
from xfresearch.files import write_text
from xfresearch.planning import hlo, memory


@dataclass(frozen=True)
class Compiled:
    """A step that was compiled: its program and the compiler's sizes in bytes per device."""

    program: hlo.Program
    arguments: float
    temporary: float
    code: float
    outputs: float  # those that do not lie where an argument lay
    seconds: float  # to trace and compile


@dataclass(frozen=True)
class Refused:
    """A step that needs more memory than the device has, in bytes, with the largest allocations that the compiler names."""

    needed: float
    available: float
    largest: list
    seconds: float


def ready(config: Config) -> Config:
    """The config with its vocabulary known, without reading any text. UserError where it is one of float64."""
    from xfresearch.data.tokenizers import vocab_size
    from xfresearch.training.abstract import with_vocabulary

    needs = "float32 in a plan: these chips are not made for float64"
    require(config.model.param_dtype == "float32", "model.param_dtype", config.model.param_dtype, needs)
    return with_vocabulary(config, config.model.vocab_size or vocab_size(config.data))


def trace(config: Config, mesh):
    """(abstract state, the step traced on `mesh`), exactly as a training run makes it."""
    from xfresearch.training.abstract import abstract_batch, abstract_state, jit_train_step
    from xfresearch.training.optimizer import make_optimizer

    optimizer = make_optimizer(config)
    state = abstract_state(config, optimizer, mesh)
    return state, jit_train_step(config, optimizer, mesh, state).trace(state, abstract_batch(config, mesh))


def compile_step(traced, text_file: str = "") -> Compiled | Refused:
    """The traced step compiled for its mesh's devices, its text also written to a file where one is named.

    What the compiler refuses for another reason than its size is raised as it is.
    """
    import jax

    began = time.perf_counter()
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        refused = memory.refused(str(error))
        if refused is None:
            raise
        return Refused(*refused, time.perf_counter() - began)
    sizes, text = compiled.memory_analysis(), compiled.as_text()
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
    """FLOPs of every matrix product of one step, counted in the traced program, loops as often as they turn.

    Counted with the plain kernels, whose products can be read: causal attention in full, each token's experts once.
    """
    from xfresearch.models.counting import count_flops

    return count_flops(*_alone(with_plain_kernels(config)))


def trace_alone(config: Config):
    """The step of a config, traced without a mesh."""
    import jax

    step, *arguments = _alone(config)
    return jax.make_jaxpr(step)(*arguments)


def _alone(config: Config) -> tuple:
    """(step, abstract state, abstract batch) of one device, layers scanned."""
    import jax

    from xfresearch.training.abstract import BATCH
    from xfresearch.training.optimizer import make_optimizer
    from xfresearch.training.step import init_state, make_train_step

    config = replace(config, training=replace(config.training, layers="scan"))
    optimizer = make_optimizer(config)
    state = jax.eval_shape(lambda seed: init_state(config, optimizer, seed), config.seed)
    shape = (config.batch_size, config.sequence_length)
    return make_train_step(config, optimizer), state, {k: jax.ShapeDtypeStruct(shape, d) for k, d in BATCH.items()}


def with_plain_kernels(config: Config) -> Config:
    return replace(config, training=replace(config.training, attention_kernel="plain", expert_kernel="ragged"))
