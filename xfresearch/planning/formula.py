"""Estimates a plan from shapes alone, without a compiler: for GPUs, and to choose which TPU plans to compile.

    weights      all-gather over fsdp in the forward and the backward pass; reduce-scatter of the gradients over fsdp,
                 all-reduce over the other axes that shard tokens
    tensor       all-reduce of each sublayer's output, or of the sum of two that read the same input, in the forward and
                 the backward pass; if everything is recomputed, once more unless it is the last one of its layer
    expert       all-to-all of every routed token to its expert and back, in every pass
    context      all-gather of keys and values in every pass; reduce-scatter of their gradients
    memory       one device: state, and the most that the traced step holds at once (traced_memory.py). Several: state,
                 gradients, saved activations (from the traced step), the gathered weights of two layers, and the logits
                 of one tile of the loss
    HBM          each pass reads its weights; activations for the backward pass are written and read once, and once more
                 if they are recomputed; the optimizer reads and writes state and gradients

Assumes that attention saves no matrix of weights, unless training.attention_kernel is 'plain'. Its FLOPs count in full:
a window or causal order skips none. The estimate is rougher than a compiled plan, which includes what the compiler adds.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from xfresearch.models import layers, transformer
from xfresearch.models.counting import count_flops, count_jaxpr
from xfresearch.models.kinds import kind_of
from xfresearch.models.layouts import LAYOUTS
from xfresearch.options.fields import with_values
from xfresearch.planning import compiling, traced_memory
from xfresearch.planning.collectives import Collective
from xfresearch.planning.work import Account, Work
from xfresearch.run_config.config import Config
from xfresearch.sharding.capacity import shard_bytes, state_bytes
from xfresearch.sharding.letters import BATCH, row_parts

TOKEN_AXES = (*BATCH, "context")  # the mesh axes that shard tokens


def abstract_mesh(sizes: dict[str, int], device: AbstractDevice | None = None) -> AbstractMesh:
    """A mesh without real devices. `device` is their type, needed if it decides which implementation is used."""
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)


def estimate_step(config: Config, sizes: dict[str, int]) -> Account:
    """The estimate for one step on a mesh of these sizes. Raises UserError if the mesh does not fit the model."""
    from xfresearch.sharding.partition import state_shardings
    from xfresearch.training.program import sharded

    shapes = _shapes(_canonical(config, "none"))
    state = jax.tree.map(sharded, shapes, state_shardings(abstract_mesh(sizes), shapes, transformer.axes(config.model)))
    shares = _Shares(config, sizes)
    weights = _weights(config, sizes, state["params"])
    kept = shares.kept(config.training.remat)
    everything = shares.kept("none")
    passes, update = shares.flops()
    devices = prod(sizes.values())
    return Account(
        works=_works(config, sizes, state, weights, (passes, update), kept, everything),
        collectives=_collectives(config, sizes, weights),
        memory=_memory(config, sizes, state, weights, kept, everything) if devices > 1 else _alone(state, kept, shares),
        kept=kept,
        state=state,
        flops=passes + update,
    )


@dataclass(frozen=True)
class _Shares:
    config: Config
    sizes: dict[str, int]

    def kept(self, remat: str) -> list[tuple[str, str, float]]:
        """Activations that the forward pass of a microbatch saves: (operation, shape, bytes per device)."""
        rows = self.config.batch_size // self.config.training.accumulate
        config = _of_other_sources(self.config)
        jaxpr = _trace_of_one_sequence(_canonical(config, remat))
        arrays = traced_memory.kept_in_trace(jaxpr, traced_memory.repeats_of_stacks(config.model), self.sizes)
        times = [1 if name == traced_memory.WEIGHTS else rows for name, _, _ in arrays]
        return [
            (name, f"{count} x {shape}", count * size)
            for count, (name, shape, size) in zip(times, arrays, strict=True)
            if config.training.attention_kernel == "plain" or not _fused(name, shape, config)
        ]

    def held(self) -> float:
        """The most bytes of intermediate arrays at once, on one device."""
        training, given = self.config.training, _of_other_sources(self.config)

        def ignored(shape: tuple) -> bool:
            return training.attention_kernel != "plain" and _is_attention_matrix(shape, given)

        config = replace(given, mesh=type(self.config.mesh)())
        jaxpr = compiling.trace_unsharded(compiling.with_plain_kernels(config)).jaxpr
        copies = training.expert_kernel == "ragged"  # the other kernels copy nothing
        return traced_memory.peak(jaxpr, ignored, copies)

    def flops(self) -> tuple[float, float]:
        """FLOPs of the passes over all sequences, and of the optimizer, whose products (Muon) run once per step."""
        config = _canonical(self.config, self.config.training.remat)
        update = _flops_of_update(config)
        return (_flops_of_one_sequence(config) - update) * self.config.batch_size, update


def _fused(name: str, shape: str, config: Config) -> bool:
    """Whether an activation of stacked layers is a matrix that a fused kernel does not save. Those of slots alone are split
    from one."""
    sizes = tuple(int(size) for size in shape[shape.index("[") + 1 : -1].split(", "))
    return _is_attention_matrix(sizes[1:], config, of_slots=name == "split")


def _is_attention_matrix(shape: tuple, config: Config, of_slots: bool = True) -> bool:
    """Whether an array is weights of queries and keys [..., R L, S], where R heads share keys. The S keys are tokens, tokens
    with slots or a sink, or slots alone. Those of cross-attention, which has no fused kernel, are of two lengths."""
    lengths = [length for length in _lengths(config) if len(shape) >= 4 and shape[-2] % length == 0]
    return any(shape[-1] in _keys(config, length) | (_slots(config) if of_slots else set()) for length in lengths)


def _lengths(config: Config) -> list[int]:
    """The lengths of the sequences that attention compares with themselves: of the tokens, and of a source."""
    return [config.sequence_length, config.source_length] if config.model.encoder else [config.sequence_length]


def _of_other_sources(config: Config) -> Config:
    """The config, with sources of one token less if they are as long as the targets: attention to the source is then known
    by its shape."""
    if config.model.encoder is None or config.source_length != config.sequence_length or config.source_length < 2:
        return config
    return replace(config, source_length=config.source_length - 1)


def _slots(config: Config) -> set[int]:
    return {each.options.slots for each in config.model.sublayers()}


def _keys(config: Config, length: int) -> set[int]:
    """Numbers of keys in sequences of a length: tokens, or tokens with slots or a sink."""
    return {length + count + sink for count in {0, *_slots(config)} for sink in (0, 1)}


def _canonical(config: Config, remat: str) -> Config:
    """The config with a batch of one sequence, so that one trace is used for all batch sizes and meshes."""
    training = with_values(config.training, {"remat": remat, "accumulate": 1, "layers": "scan"})
    return compiling.with_plain_kernels(replace(config, batch_size=1, training=training, mesh=type(config.mesh)()))


@lru_cache
def _shapes(config: Config):
    from xfresearch.training.program import Program

    return Program(config).shapes


@lru_cache
def _trace_of_one_sequence(config: Config):
    return compiling.trace_unsharded(config).jaxpr


@lru_cache
def _flops_of_one_sequence(config: Config) -> int:
    return count_jaxpr(_trace_of_one_sequence(config))


@lru_cache
def _flops_of_update(config: Config) -> int:
    from xfresearch.training.hyperparameters import hyper_of
    from xfresearch.training.optimizer import trainable
    from xfresearch.training.program import Program

    state = _shapes(config)
    trained, _ = trainable(config.optimizer, state["params"])
    update = partial(Program(config).rule.update, step=0, hyper=hyper_of(config))
    return count_flops(update, trained, state["opt"], trained)


@dataclass(frozen=True)
class _Weight:
    gathered: float  # bytes on one device after the all-gather over fsdp, in the dtype of the computation
    shard: float  # bytes of one device's shard of the parameter
    axes: set  # mesh axes that shard it
    trained: bool  # a frozen parameter has no gradient and no update


def _weights(config: Config, sizes: dict, params) -> list[_Weight]:
    from xfresearch.training.optimizer import trainable

    width = 4 if config.model.dtype == "float32" else 2
    weights = []
    for part, trained in zip(trainable(config.optimizer, params), (True, False), strict=True):
        for leaf in jax.tree.leaves(part):
            spec = [(name,) if isinstance(name, str) else name or () for name in leaf.sharding.spec]
            axes = {axis for names in spec for axis in names if sizes[axis] > 1}
            whole = leaf.size * width / prod(sizes[axis] for axis in axes - {"fsdp"})
            weights.append(_Weight(whole, shard_bytes(leaf), axes, trained))
    return weights


def _collectives(config: Config, sizes: dict, weights: list[_Weight]) -> list[Collective]:
    estimated = []
    model = config.model
    microbatches = config.training.accumulate
    passes = 2 + (config.training.remat != "none")

    def add(kind: str, axes: tuple, runs: float, payload: float, source: str) -> None:
        axes = tuple(axis for axis in axes if sizes[axis] > 1)
        if axes and payload and runs:
            estimated.append(Collective(kind, axes, True, _group(axes, sizes), runs, payload, False, source, source))

    trained = [w for w in weights if w.trained]
    gathered, scattered = (sum(w.gathered for w in each if "fsdp" in w.axes) for each in (weights, trained))
    add("all-gather", ("fsdp",), 2 * microbatches, gathered, "weights")
    add("reduce-scatter", ("fsdp",), microbatches, scattered, "gradients")
    for axes in {frozenset(w.axes) for w in trained}:
        others = tuple(axis for axis in TOKEN_AXES if axis not in axes)
        share = sum(w.gathered / (sizes["fsdp"] if "fsdp" in axes else 1) for w in trained if frozenset(w.axes) == axes)
        add("all-reduce", others, microbatches, share, "gradients")
    rows = config.batch_size / (microbatches * row_parts(sizes))
    width = 2 if model.dtype == "bfloat16" else 4
    for stack in model.all_stacks:
        length = config.source_length if stack.prefix else config.sequence_length
        repeats: Counter = Counter()
        for each in layers.stacks(stack):
            repeats[each.block] += microbatches * each.repeats
        for name, branch, place in stack.places():
            count, source = repeats[name], f"{stack.prefix}{name}"
            traffic = kind_of(place.options).module.traffic(place)
            sums = _sums(stack.blocks[name].layout, branch.name, config.training.remat)
            tokens = rows * length / sizes["context"]
            add("all-reduce", ("tensor",), sums * count, tokens * stack.width * width, f"{source}: outputs of {branch.name}")
            add("all-to-all", ("expert",), 2 * passes * count, tokens * traffic.routed * width, f"{source}: tokens")
            if place.source_width:  # the gradient for the source, which is summed over the heads
                of_source = rows * config.source_length / sizes["context"] * place.source_width * width
                add("all-reduce", ("tensor",), count, of_source, f"{source}: gradient of the source")
            read = config.source_length if place.source_width else length
            keys = rows * read * traffic.context / sizes["tensor"] * width
            add("all-gather", ("context",), passes * count, keys, f"{source}: keys and values")
            add("reduce-scatter", ("context",), count, keys, f"{source}: keys and values")
    return estimated


def _sums(layout: str, name: str, remat: str) -> int:
    """How often a layer sums a sublayer's output over `tensor`: in the forward pass, and its gradient in the backward pass.
    A layer that is recomputed in full sums it once more for the next sublayer; with remat='dots' it is saved. If the next
    sublayer reads the same input, both outputs are summed at once."""
    branches = LAYOUTS[layout].branches
    at = [each.name for each in branches].index(name)
    after = branches[at + 1 :]
    if after and after[0].connection.reads == "before":
        return 0
    return 2 + (remat == "full" and bool(after))


def _group(axes: tuple, sizes: dict) -> tuple[int, ...]:
    grid = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    index = tuple(slice(None) if axis in axes else 0 for axis in sizes)
    return tuple(grid[index].reshape(-1).tolist())


def _sum(kept: list) -> float:
    return sum(size for _, _, size in kept)


def _works(config: Config, sizes: dict, state, weights: list, flops: tuple, kept: list, everything: list) -> list[Work]:
    devices = prod(sizes.values())
    recompute = config.training.remat != "none"
    microbatches = config.training.accumulate
    # Each pass reads the weights; the backward pass writes a gradient.
    moved = microbatches * sum(w.gathered * (2 + w.trained + recompute) for w in weights)
    moved += 2 * microbatches * (_sum(everything) * (1 + recompute) + (_sum(kept) if recompute else 0))
    trained = sum(w.shard for w in weights if w.trained)
    update = 2 * (state_bytes(state)["optimizer"] + trained) + 2 * trained
    shards = sizes["fsdp"] * sizes["expert"] * sizes["tensor"]  # replicas all compute the same update
    return [
        Work("passes", "forward and backward", 1, flops[0] / devices, moved),
        Work("update", "optimizer", 1, flops[1] / shards, update),
    ]


def _alone(state, kept: list, shares: _Shares) -> dict[str, float]:
    """Bytes on one device. Gradients are part of `temporary`: they take the place of activations."""
    held = shares.held()
    return state_bytes(state) | {"activations": min(_sum(kept), held), "temporary": max(held - _sum(kept), 0)}


def _memory(config: Config, sizes: dict, state, weights: list, kept: list, everything: list) -> dict[str, float]:
    repeats = sum(traced_memory.repeats_of_stacks(config.model))
    rows = min(config.training.loss_rows, config.batch_size * config.sequence_length)
    logits = 3 * 4 * rows * config.model.vocab_size / sizes["tensor"]
    table = config.model.vocab_size * config.model.width * 4 / sizes["tensor"]
    one = _sum(everything) / repeats if config.training.remat != "none" else 0
    return state_bytes(state) | {
        "gradients": sum(w.shard for w in weights if w.trained),
        "activations": _sum(kept),
        "temporary": 2 * sum(w.gathered for w in weights) / repeats + table + logits + one,
    }
