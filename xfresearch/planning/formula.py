"""A plan without a compiler, for GPUs and for choosing what to compile: the same resources, reckoned from shapes.

    weights      gathered over fsdp for the forward and the backward pass, their gradients scattered; summed over the other
                 axes that cut tokens
    tensor       two sums of a layer's output forward, two backward, and two more where the forward pass is run again
    expert       every routed token goes to its expert and back, forward and backward
    context      keys and values gathered forward and backward, their gradients scattered
    memory       state, gradients, what the forward pass keeps (read from the traced step), two layers' gathered weights,
                 and the logits of one tile of the loss
    HBM          each pass reads its weights; what the backward pass needs is written and read once, and once more where
                 it is computed anew; the optimiser reads and writes state and gradients

Attention is taken to keep no matrix of weights. It is rougher than a compiled plan, which sees what the compiler adds.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from xfresearch.config.run import Config
from xfresearch.models import layers, transformer
from xfresearch.models.counting import count_flops, count_jaxpr
from xfresearch.models.kinds import kind_of
from xfresearch.planning import memory, program
from xfresearch.planning.collectives import Collective
from xfresearch.planning.work import Work
from xfresearch.sharding.letters import BATCH, row_parts

TOKENS = (*BATCH, "context")  # the axes that cut tokens


@dataclass(frozen=True)
class Formula:
    works: list[Work]
    collectives: list[Collective]
    memory: dict[str, float]  # bytes per device by kind
    kept: list
    state: dict
    flops: float  # of a step on all devices, recomputation included


def abstract_mesh(sizes: dict[str, int], device: AbstractDevice | None = None) -> AbstractMesh:
    """A mesh of devices that are not here; `device` says what they are, where that decides between implementations."""
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)


def reckon(config: Config, sizes: dict[str, int]) -> Formula:
    """UserError where the mesh does not go with the model."""
    from xfresearch.sharding.partition import state_shardings
    from xfresearch.training.abstract import placed

    shapes = _shapes(_canonical(config, "none"))
    state = jax.tree.map(placed, shapes, state_shardings(abstract_mesh(sizes), shapes, transformer.axes(config.model)))
    shares = _Shares(config, sizes)
    weights = _weights(config, sizes, state["params"])
    kept, everything = shares.kept(config.training.remat), shares.kept("none")
    passes, update = shares.flops()
    return Formula(
        works=_works(config, sizes, state, weights, (passes, update), kept, everything),
        collectives=_collectives(config, sizes, weights),
        memory=_memory(config, sizes, state, weights, kept, everything),
        kept=kept,
        state=state,
        flops=passes + update,
    )


@dataclass(frozen=True)
class _Shares:
    config: Config
    sizes: dict[str, int]

    def kept(self, remat: str) -> list[tuple[str, str, float]]:
        """What the forward pass of a microbatch keeps, in bytes per device."""
        rows = self.config.batch_size // self.config.training.accumulate
        jaxpr = _one_sequence(_canonical(self.config, remat))
        found = memory.kept_in_trace(jaxpr, layers.most_repeats(self.config.model), self.sizes)
        return [
            (name, f"{rows} x {shape}", rows * size)
            for name, shape, size in found
            if not _weights_of_attention(shape, self.config)
        ]

    def flops(self) -> tuple[float, float]:
        """Of the passes over all sequences, and of the optimiser, which multiplies once a step (Muon)."""
        config = _canonical(self.config, self.config.training.remat)
        update = _flops_of_update(config)
        return (_flops_of_one_sequence(config) - update) * self.config.batch_size, update


def _weights_of_attention(shape: str, config: Config) -> bool:
    sizes = shape[shape.index("[") + 1 : -1].split(", ")
    length = str(config.sequence_length)
    return len(sizes) >= 5 and sizes[-2:] == [length, length]


def _canonical(config: Config, remat: str) -> Config:
    """The config with a batch of one sequence: what is traced once serves all batch sizes and meshes."""
    training = replace(config.training, remat=remat, accumulate=1, layers="scan")
    return program.with_plain_kernels(replace(config, batch_size=1, training=training, mesh=type(config.mesh)()))


@lru_cache
def _shapes(config: Config):
    from xfresearch.training.optimizer import make_optimizer
    from xfresearch.training.step import init_state

    optimizer = make_optimizer(config)
    return jax.eval_shape(lambda seed: init_state(config, optimizer, seed), config.seed)


@lru_cache
def _one_sequence(config: Config):
    return program.trace_alone(config).jaxpr


@lru_cache
def _flops_of_one_sequence(config: Config) -> int:
    return count_jaxpr(_one_sequence(config))


@lru_cache
def _flops_of_update(config: Config) -> int:
    from xfresearch.training.optimizer import make_optimizer

    state = _shapes(config)
    return count_flops(
        make_optimizer(config).update, state["params"], state["opt"], state["params"]
    )


@dataclass(frozen=True)
class _Weight:
    gathered: float  # bytes on one device in the dtype of the computation, not cut by fsdp
    kept: float  # bytes of its part of the parameter
    axes: set  # mesh axes that cut it


def _weights(config: Config, sizes: dict, params) -> list[_Weight]:
    width = 4 if config.model.dtype == "float32" else 2
    found = []
    for leaf in jax.tree.leaves(params):
        cut = [(name,) if isinstance(name, str) else name or () for name in leaf.sharding.spec]
        axes = {axis for names in cut for axis in names if sizes[axis] > 1}
        whole = leaf.size * width / np.prod([sizes[axis] for axis in axes - {"fsdp"}], initial=1)
        found.append(_Weight(float(whole), memory.shard_bytes(leaf), axes))
    return found


def _collectives(config: Config, sizes: dict, weights: list[_Weight]) -> list[Collective]:
    found, parts, model = [], config.training.accumulate, config.model
    passes = 2 + (config.training.remat != "none")

    def add(kind: str, axes: tuple, runs: float, payload: float, source: str) -> None:
        axes = tuple(axis for axis in axes if sizes[axis] > 1)
        if axes and payload:
            found.append(Collective(kind, axes, True, _group(axes, sizes), runs, payload, False, source, source))

    cut = sum(w.gathered for w in weights if "fsdp" in w.axes)
    add("all-gather", ("fsdp",), 2 * parts, cut, "weights")
    add("reduce-scatter", ("fsdp",), parts, cut, "gradients")
    for axes in {frozenset(w.axes) for w in weights}:
        others = tuple(axis for axis in TOKENS if axis not in axes)
        share = sum(w.gathered / (sizes["fsdp"] if "fsdp" in axes else 1) for w in weights if frozenset(w.axes) == axes)
        add("all-reduce", others, parts, share, "gradients")
    rows = config.batch_size / (parts * row_parts(sizes))
    tokens = rows * config.sequence_length / sizes["context"]
    width = 2 if model.dtype == "bfloat16" else 4
    stream = tokens * model.width * width
    repeats = Counter()
    for stack in layers.stacks(model):
        repeats[stack.block] += parts * stack.repeats
    for name, sublayer, place in model.places():
        count, traffic = repeats[name], kind_of(place.options).module.traffic(place)
        add("all-reduce", ("tensor",), passes * count, stream, f"{name}: outputs of {sublayer.name}")
        add("all-to-all", ("expert",), 2 * passes * count, tokens * traffic.routed * width, f"{name}: tokens")
        keys = rows * config.sequence_length * traffic.context / sizes["tensor"] * width
        add("all-gather", ("context",), passes * count, keys, f"{name}: keys and values")
        add("reduce-scatter", ("context",), count, keys, f"{name}: keys and values")
    return found


def _group(axes: tuple, sizes: dict) -> tuple[int, ...]:
    grid = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
    index = tuple(slice(None) if axis in axes else 0 for axis in sizes)
    return tuple(grid[index].reshape(-1).tolist())


def _sum(kept: list) -> float:
    return sum(size for _, _, size in kept)


def _works(config: Config, sizes: dict, state, weights: list, flops: tuple, kept: list, everything: list) -> list[Work]:
    devices, again = int(np.prod(list(sizes.values()))), config.training.remat != "none"
    parts, gathered = config.training.accumulate, sum(w.gathered for w in weights)
    moved = parts * gathered * (3 + again) + 2 * parts * (_sum(everything) * (1 + again) + (_sum(kept) if again else 0))
    whole = sum(memory.state_bytes(state).values())
    update = 2 * whole + 2 * sum(w.kept for w in weights)
    shards = sizes["fsdp"] * sizes["expert"] * sizes["tensor"]  # replicas all do the same update
    return [
        Work("passes", "forward and backward", 1, flops[0] / devices, moved),
        Work("update", "optimiser", 1, flops[1] / shards, update),
    ]


def _memory(config: Config, sizes: dict, state, weights: list, kept: list, everything: list) -> dict[str, float]:
    repeats = layers.most_repeats(config.model)
    rows = min(config.training.loss_rows, config.batch_size * config.sequence_length)
    logits = 3 * 4 * rows * config.model.vocab_size / sizes["tensor"]
    table = config.model.vocab_size * config.model.width * 4 / sizes["tensor"]
    one = _sum(everything) / repeats if config.training.remat != "none" else 0
    return memory.state_bytes(state) | {
        "gradients": sum(w.kept for w in weights),
        "activations": _sum(kept),
        "temporary": 2 * sum(w.gathered for w in weights) / repeats + table + logits + one,
    }
