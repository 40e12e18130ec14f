"""Whether a run fits into memory: its state before it is made, and its update when it is compiled, before the first one.

What is compared is the least that is needed, so that nothing is refused that would fit. An allocation that fails all the
same is told in one line, with the advice of a plan (`python -m xfresearch.plan`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
from jax.sharding import Mesh

from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError, out_of_memory
from xfresearch.runtime.tables import count
from xfresearch.sharding.capacity import require_room, room_of, shard_bytes, state_bytes
from xfresearch.sharding.letters import row_parts
from xfresearch.sharding.mesh import make_mesh
from xfresearch.training.optimizer import trainable
from xfresearch.training.program import Program, shared_program


def fitting_program(config: Config, mesh: Mesh) -> Program:
    """`shared_program`. Raises UserError if the state of a run does not fit, or not with its gradients, which a norm over
    all of them (optimizer.clip) holds at once. Nothing is traced for it that a run does not trace."""
    program = shared_program(config, mesh)
    state = program.abstract_state
    parts = state_bytes(state)
    trained = trainable(config.optimizer, state["params"])[0]
    whole = config.optimizer.clip and config.optimizer.clip_by != "tensor"
    parts |= {"gradients": sum(map(shard_bytes, jax.tree.leaves(trained)))} if whole else {}
    parameters, size = sum(leaf.size for leaf in jax.tree.leaves(state["params"])), sum(parts.values())

    def would_fit(available: float) -> str:
        most = count(parameters * available / size)
        return f"{most} parameters like these would fit; {advice(config, mesh.shape, parts, available)[0]}"

    require_room(f"the state of {count(parameters)} parameters", parts, mesh.devices.flat, would_fit)
    return program


def fitting(compiled: jax.stages.Compiled, config: Config, mesh: Mesh) -> jax.stages.Compiled:
    """The compiled update. Raises UserError if what it needs, by the compiler's count, does not fit."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        return compiled
    state, results = sizes.argument_size_in_bytes, sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    parts = {"state and batch": state, "temporary arrays and results": sizes.temp_size_in_bytes + results}

    def would_fit(available: float) -> str:
        return "; ".join(advice(config, mesh.shape, {"parameters": state, "optimizer": 0}, available))

    require_room("an update", parts, mesh.devices.flat, would_fit)
    return compiled


@contextmanager
def advising(config: Config) -> Iterator[None]:
    """An allocation that fails in the `with` block raises UserError, with what would need less."""
    try:
        yield
    except Exception as error:
        reason = out_of_memory(error)
        if not reason or isinstance(error, UserError):
            raise
        mesh = make_mesh(config)
        state, available = state_bytes(shared_program(config, mesh).abstract_state), room_of(mesh.devices.flat)
        less = advice(config, mesh.shape, state, available)
        raise UserError(f"the run needs more memory than there is ({reason}): {'; '.join(less)}") from error


def advice(config: Config, mesh: Mapping[str, int], parts: dict, available: float) -> list[str]:
    """Changes to try if a plan does not fit, the cheapest first."""
    state = parts["parameters"] + parts["optimizer"]
    rows = config.batch_size // (row_parts(mesh) * config.training.accumulate)
    lines = []
    if state > 0.4 * available and mesh["data"] > 1:
        lines.append(
            f"config.mesh.fsdp={mesh['data'] * mesh['fsdp']} instead of data: shards the state over more devices"
        )
    elif state > 0.4 * available:
        lines.append("more devices, or config.mesh.tensor: parameters and optimizer state alone take much memory")
    if config.training.remat != "full":
        lines.append("config.training.remat=full: recomputes activations in the backward pass")
    if rows > 1:
        lines.append(
            f"config.training.accumulate={rows * config.training.accumulate}: 1 sequence per device at once, not {rows}"
        )
        lines.append(f"config.batch_size={config.batch_size // 2}")
    elif mesh["context"] == 1 and config.sequence_length >= 4096:
        lines.append("config.mesh.context=2: a device stores half of each sequence")
    if config.model.dtype == "float32":
        lines.append("config.model.dtype=bfloat16: halves the activations")
    return lines or ["more devices"]
