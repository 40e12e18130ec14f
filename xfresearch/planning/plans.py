"""Makes a plan: the cost of one training step of a config on a machine, as a dict (docs/plan.md explains each part)."""

from dataclasses import replace
from math import prod
from typing import Any

import jax

from xfresearch.models.model_config import mixtures
from xfresearch.planning import compiling, traced_memory
from xfresearch.planning.chips import CHIPS
from xfresearch.planning.collectives import collectives
from xfresearch.planning.links import locations
from xfresearch.planning.step_time import Roofline, expected_seconds, most_similar, roofline, time_collectives
from xfresearch.planning.topologies import Topology, gpus, tpu_devices
from xfresearch.planning.work import Account, unknown_kernels, work
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError, require
from xfresearch.runtime.trees import path_name
from xfresearch.sharding.capacity import shard_bytes, state_bytes
from xfresearch.sharding.letters import row_parts
from xfresearch.training.fitting import advice

LARGEST = 6  # number of arrays listed if a plan does not fit


def compiled_plan(config: Config, topology: Topology, tokens: float, devices, text_file: str = "") -> dict:
    """The plan of a config, compiled for the topology's devices.

    Raises UserError if the config does not fit the topology.
    """
    from xfresearch.sharding.mesh import make_mesh, spread_axis

    config = compiling.prepare(config)
    mesh = make_mesh(config, devices)
    state, traced = compiling.trace(config, mesh)
    compiled = compiling.compile_step(traced, text_file)
    sizes = dict(mesh.shape)
    between = spread_axis(sizes, topology.slices, config.mesh.between)
    plan = header(config, topology, sizes, "compiled") | {"compile_seconds": compiled.seconds}
    if isinstance(compiled, compiling.OutOfMemory):
        return plan | {"memory": _memory_of_failed(config, sizes, state, traced, compiled)}
    account = _account_of(config, sizes, between, topology.slices, state, compiled)
    plan["memory"] = _memory(config, sizes, account, topology.chip.memory, topology.tpu)  # too large, it does not compile
    plan["flops"] = {"traced": compiling.traced_flops(config), "compiled": account.flops}
    plan["unknown_kernels"] = unknown_kernels(compiled.program)
    plan["loops_of_unknown_turns"] = compiled.program.loops_of_unknown_trip_count()
    return _with_times(config, plan, account, topology, mesh, tokens)


def routed_tokens(config: Config, mesh: dict[str, int]) -> float:
    """Tokens that a device's experts receive in a microbatch if routing is balanced; a token counts once per expert."""
    top_k = max((moe.top_k for moe in mixtures(config.model)), default=0)
    shards = row_parts(mesh) * mesh["context"] * config.training.accumulate
    return config.batch_size * config.sequence_length * top_k / shards


def header(config: Config, topology: Topology | None, mesh: dict[str, int], method: str) -> dict:
    """The part of a plan that is known before compilation."""
    from xfresearch.run_config.closed_form import costs

    counted = costs(config.model, config.sequence_length)
    longer = costs(config.model, 2 * config.sequence_length)
    attention = longer.flops_per_token - counted.flops_per_token  # only attention grows with the length
    attention = 0 if config.model.encoder else attention  # a token's share in the encoder falls with the length
    return {
        "method": method,
        "topology": topology and describe(topology, config.model.dtype),
        "mesh": mesh,
        "parameters": counted.parameters,
        "active_parameters": counted.active_parameters,
        "model_flops": counted.training_flops_per_token * config.batch_size * config.sequence_length,
        "half_attention": 1 - attention / counted.flops_per_token / 2,  # share of the FLOPs if attention counts in half
        "batch": {
            "sequences": config.batch_size,
            "sequence_length": config.sequence_length,
            "tokens": config.batch_size * config.sequence_length,
            "accumulate": config.training.accumulate,
        },
        "remat": config.training.remat,
        "dtype": config.model.dtype,
    }


def describe(topology: Topology, dtype: str) -> dict:
    chip = topology.chip
    return {
        "name": topology.name,
        "chips": topology.chips,
        "devices": topology.devices,
        "peak_flops": chip.peak(dtype),
        "memory": chip.memory,
        "memory_bandwidth": chip.memory_bandwidth,
        "link_bandwidth": chip.link,
        "network_bandwidth": chip.network,
    }


def _account_of(config: Config, sizes: dict, between: str, slices: int, state, compiled: compiling.Compiled) -> Account:
    """What a compiled step takes."""
    works = work(compiled.program, routed_tokens(config, sizes), config.model.causal)
    kept = compiling.kept_activations(compiled.program)
    activations = min(sum(size for _, _, size in kept), compiled.temporary)
    memory: dict[str, float] = {**state_bytes(state)}
    memory["batch and padding"] = max(compiled.arguments - sum(memory.values()), 0)
    memory |= {"activations": activations, "temporary": compiled.temporary - activations + compiled.outputs}
    memory["program"] = compiled.code
    flops = sum(w.runs * w.flops for w in works) * prod(sizes.values())
    return Account(works, collectives(compiled.program, sizes, between, slices), memory, kept, state, flops)


def _memory(config: Config, mesh: dict, account: Account, available: float, fits: bool = False) -> dict:
    """Whether a step fits the memory of a device. If it does not: its largest arrays, and advice. `fits`: it is known to."""
    total = sum(account.memory.values())
    figures = {"fits": fits or total <= available, "total": total, "available": available, "parts": account.memory}
    return figures if figures["fits"] else figures | _too_large(config, mesh, account, available)


def _too_large(config: Config, mesh: dict, account: Account, available: float) -> dict[str, Any]:
    largest = {"kept for the backward pass": account.kept[:LARGEST], "state": largest_of_state(account.state)}
    return {"largest": largest, "advice": advice(config, mesh, account.memory, available)}


def _memory_of_failed(config: Config, mesh: dict, state, traced, failed: compiling.OutOfMemory) -> dict:
    account = Account([], [], {**state_bytes(state)}, kept_in_trace(config, traced, mesh), state, 0)
    figures = {"fits": False, "total": failed.needed, "available": failed.available, "parts": account.memory}
    why = _too_large(config, mesh, account, failed.available)
    largest = {"allocations, the compiler says": failed.largest[:LARGEST], **why["largest"]}
    return figures | why | {"largest": largest}


def largest_of_state(state, count: int = LARGEST) -> list[tuple[str, str, int]]:
    """(name, global shape, bytes per device) of the largest arrays of the training state."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    rows = [(path_name(path), f"{leaf.dtype}{list(leaf.shape)}", shard_bytes(leaf)) for path, leaf in flat]
    return sorted(rows, key=lambda row: -row[2])[:count]


def _table(timed) -> list[dict]:
    """Collectives summed by kind, axes and asynchrony, the slowest first."""
    rows: dict = {}
    for one, inside, between in timed:
        axes = one.axes if one.whole else ("part of", *one.axes)
        row = rows.setdefault(
            (one.kind, axes, one.asynchronous), dict.fromkeys(("count", "bytes", "sent", "seconds"), 0)
        )
        row["count"] += one.runs
        row["bytes"] += one.runs * one.payload
        row["sent"] += one.runs * one.sent
        row["seconds"] += one.runs * (inside + between)
    total = sum(row["seconds"] for row in rows.values()) or 1
    named = [
        {"kind": kind, "axes": list(axes), "asynchronous": asynchronous, **row, "share": row["seconds"] / total}
        for (kind, axes, asynchronous), row in rows.items()
    ]
    return sorted(named, key=lambda row: -row["seconds"])


def kept_in_trace(config: Config, traced, mesh: dict) -> list[tuple[str, str, float]]:
    """What the layers of a traced step keep for the backward pass."""
    return traced_memory.kept_in_trace(traced.jaxpr.jaxpr, traced_memory.repeats_of_stacks(config.model), mesh)


def _with_times(config: Config, plan: dict, account: Account, topology: Topology, mesh, tokens: float) -> dict:
    """The plan with what its step moves, and how long that takes."""
    timed = time_collectives(account.collectives, topology, locations(topology, mesh.devices.flat))
    plan |= {"bytes_moved": sum(w.runs * w.bytes for w in account.works), "collectives": _table(timed)}
    line = roofline(topology.chip, account.works, timed, config.model.dtype)
    return plan | estimate(config, plan, line, topology, tokens)


def estimate(config: Config, plan: dict, line: Roofline, topology: Topology, tokens: float) -> dict:
    """Step time and the figures that follow from it, each as [not overlapped, overlapped]; `expected` has one of each, or
    is None where no update like this one was measured on the chip."""
    ideal = plan["model_flops"] / (topology.chip.peak(plan["dtype"]) * topology.devices)
    figures = _figures([line.serial, line.overlapped], plan, ideal, topology, tokens)
    row = most_similar(topology.family, config)
    if row is None:
        return figures | {"time": _seconds(line), "budget_tokens": tokens, "expected": None}
    recomputed = plan["flops"]["traced"] / plan["model_flops"]
    time = expected_seconds(row, ideal, recomputed, line.links + line.network)
    expected = {name: value for name, (value,) in _figures([time], plan, ideal, topology, tokens).items()}
    expected |= {"model": row.model, "settings": row.settings, "source": row.source}
    return figures | {"time": _seconds(line), "budget_tokens": tokens, "expected": expected}


def _seconds(line: Roofline) -> dict:
    names = ("arithmetic", "memory", "links", "network", "instructions", "limit")
    return {name: getattr(line, name) for name in names}


def _figures(times: list[float], plan: dict, ideal: float, topology: Topology, tokens: float) -> dict[str, list]:
    """{figure: [its value for each of the times]} of a step. ideal: seconds of the model's FLOPs at the peak."""
    per_step = plan["batch"]["tokens"]
    hours = [tokens / per_step * time / 3600 for time in times]
    return {
        "step_seconds": times,
        "tokens_per_second": [per_step / time for time in times],
        "utilisation": [ideal / time for time in times],
        "hours": hours,
        "chip_hours": [h * topology.chips for h in hours],
    }


def formula_plan(config: Config, topology: Topology, tokens: float, devices) -> dict:
    """The plan of a config by formula. Raises UserError if the config does not fit the topology."""
    from xfresearch.planning.formula import estimate_step
    from xfresearch.sharding.mesh import make_mesh
    from xfresearch.training.kernel_choices import kernel_choices

    config = compiling.prepare(config)
    mesh = make_mesh(config, devices)
    kernel_choices(config, mesh)  # raises UserError if the config names a kernel that does not support this machine
    sizes = dict(mesh.shape)
    account = estimate_step(with_loss_rows(config, topology, sizes), sizes)
    plan = header(config, topology, sizes, "formula")
    plan["memory"] = _memory(config, sizes, account, topology.chip.memory)
    plan["flops"] = {"traced": account.flops}
    return _with_times(config, plan, account, topology, mesh, tokens)


def with_loss_rows(config: Config, topology: Topology, mesh: dict) -> Config:
    """The config with the number of rows that a run on this topology would use."""
    from xfresearch.kernels.defaults import LOSS_ROWS, Setting, choose_default

    platform = "tpu" if topology.tpu else "gpu"
    vocabulary = config.model.vocab_size // mesh["tensor"]
    auto = choose_default(LOSS_ROWS, Setting(platform, int(topology.chip.memory), vocabulary=vocabulary))
    rows = config.training.loss_rows or int(auto.name)
    return replace(config, training=replace(config.training, loss_rows=rows))


def check(config: Config) -> dict:
    """Checks a config's shapes and shardings on an abstract mesh of v5p.

    Lowers the step with TPU kernels, but does not compile it. Raises UserError if the mesh does not fit model or batch.
    """
    from jax.sharding import AbstractDevice

    from xfresearch.planning.formula import abstract_mesh
    from xfresearch.sharding.mesh import AXES, check_batch, mesh_sizes

    config = compiling.prepare(config)
    mesh = replace(config.mesh, data=1) if config.mesh.data == -1 else config.mesh
    for axis in AXES:
        require(getattr(mesh, axis) > 0, f"mesh.{axis}", getattr(mesh, axis), "at least 1 without --topology")
    sizes = mesh_sizes(mesh, prod(getattr(mesh, axis) for axis in AXES))
    lengths = config.sequence_length, config.training.accumulate, config.source_length
    check_batch(sizes, config.batch_size, *lengths)
    device = AbstractDevice(CHIPS["v5p"].kind, num_cores=None, platform="tpu")
    state, traced = compiling.trace(config, abstract_mesh(sizes, device))
    traced.lower(lowering_platforms=("tpu",))
    kept = kept_in_trace(config, traced, sizes)
    parts: dict[str, float] = {**state_bytes(state)}
    if kept:  # empty with unrolled layers, which have no scan to read the activations from
        parts["kept for the backward pass"] = sum(size for _, _, size in kept)
    return header(config, None, sizes, "checked") | {"parts": parts, "largest": largest_of_state(state)}


def make_plan(config: Config, topology: Topology, tokens: float, text_file: str = "") -> dict:
    """The best plan available: compiled for TPUs and for GPUs of this machine, by formula for other GPUs."""
    if topology.tpu:
        return compiled_plan(config, topology, tokens, tpu_devices(topology), text_file)
    if here := _gpus_here(topology):
        return compiled_plan(config, topology, tokens, here, text_file)
    if text_file:
        raise UserError(
            f"--hlo={text_file} is not allowed with --topology={topology.name}: this machine does not have these GPUs, "
            "so the plan is by formula and has no program"
        )
    return formula_plan(config, topology, tokens, gpus(topology))


def _gpus_here(topology: Topology) -> list:
    """This machine's GPUs, as many as the topology has; [] if there are too few of that type."""
    try:
        devices = [device for device in jax.devices("gpu") if device.device_kind.startswith(topology.chip.kind)]
    except RuntimeError:
        return []
    return devices[: topology.devices] if topology.slices == 1 and len(devices) >= topology.devices else []
