"""Finds the collectives of a compiled program: their mesh axes, how often they run, and the bytes they move."""

import re
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from xfresearch.planning.hlo import Instruction, Program, match_of

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([^)]*\))?)\))? \{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """One collective instruction. Bytes are per device and run.

    `group` is the group that contains device 0, or the first device listed. Its entries are indices into the flat mesh.
    """

    kind: str
    axes: tuple[str, ...]  # mesh axes along which the devices of a group differ
    whole: bool  # whether the group contains all devices along these axes
    group: tuple[int, ...]
    runs: float  # in one step
    payload: float  # the whole array that is gathered, reduced, exchanged or permuted
    asynchronous: bool  # whether other instructions run at the same time
    name: str
    source: str  # the operation of the traced program that it belongs to

    @property
    def sent(self) -> float:
        """Bytes that one device sends in one run: all but its own shard, and twice that for reduce plus gather."""
        n = len(self.group)
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload
        return self.payload * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


def collectives(program: Program, mesh: dict[str, int], between: str = "", slices: int = 1) -> list[Collective]:
    """All collectives of a step on a mesh of these sizes, except those whose group is a single device.

    between: the mesh axis that crosses slices. slices: the number of slices.
    """
    costs = []
    asynchronous = program.asynchronous_computations()
    for name, runs in program.runs().items():
        computation = program.computations[name]
        for instruction in computation.instructions.values():
            if "_xla_megascale_transfer_type" in instruction.text and instruction.opcode == "send":
                costs.append(_between_slices(instruction, mesh, between, slices, runs))
            for one in _started_by(program, instruction):
                made = _collective(one, instruction, mesh, runs)
                if made.kind == "ragged-all-to-all":  # one of its two buffers has spare capacity
                    made = replace(made, payload=min(made.payload, computation.operand(one, 0).bytes))
                if len(made.group) > 1:
                    costs.append(replace(made, asynchronous=made.asynchronous or name in asynchronous))
    return costs


def _between_slices(send: Instruction, mesh: dict[str, int], between: str, slices: int, runs: float) -> Collective:
    """The exchange between the hosts of different slices: a send and recv pair that names the collective it implements.

    The payload is the device's own shard, because separate collectives inside the slice scatter before and gather
    after.
    """
    kind = match_of(r'_xla_megascale_transfer_type="(\w+)"', send.text)[1].lower().replace("_", "-")
    kind = kind if kind in KINDS else "collective-permute"
    step = mesh[between] // slices  # devices of one slice along the axis
    grid = np.arange(prod(mesh.values())).reshape(tuple(mesh.values()))
    index = tuple(slice(None, None, step) if axis == between else 0 for axis in mesh)
    group = tuple(grid[index].reshape(-1).tolist())
    return Collective(kind, (between,), step == 1, group, runs, send.outputs[0].bytes, True, send.name, send.op_name)


def _started_by(program: Program, instruction: Instruction) -> list[Instruction]:
    """The collectives that an instruction starts: itself, or those fused into it.

    A start and done pair counts once. The TPU compiler splits an asynchronous collective over several fusions, each of
    which repeats it. Only the fusion that contains its start counts.
    """
    fused = program.fused(instruction)
    if fused is None:
        return [instruction] if kind_of(instruction.opcode) else []
    started = [one for inner in fused.instructions.values() for one in _started_by(program, inner)]
    markers = " ".join(one.text for one in fused.instructions.values() if "AsyncCollective" in one.text)
    if "AsyncCollectiveStart" in markers:
        return started
    return [one for one in started if "AsyncCollectiveDone" not in markers and "chain_id=" not in one.text]


def kind_of(opcode: str) -> str | None:
    """The kind of collective that an instruction starts, or None."""
    base = opcode.removesuffix("-start")
    return base if base in KINDS else None


def _collective(one: Instruction, outer: Instruction, mesh: dict[str, int], runs: float) -> Collective:
    kind = one.opcode.removesuffix("-start")
    started = one.opcode.endswith("-start")
    group = replica_group(one.text, prod(mesh.values()))
    sizes = [array.bytes for array in one.outputs]
    payload = sum(sizes)
    if kind == "all-gather" and started:  # the outputs are (operands, results)
        payload *= len(group) / (len(group) + 1)
    if kind == "collective-permute" and started:  # the outputs are (operand, result, two counters)
        payload = sizes[0]
    if kind == "reduce-scatter":
        payload *= len(group)
    if kind == "all-reduce" and "all-reduce-scatter" in outer.text:  # TPU: a device keeps only its own shard of the sum
        kind = "reduce-scatter"
    axes, whole = mesh_axes(group, mesh)
    asynchronous = started or (outer is not one and kind != "reduce-scatter") or "async" in outer.name
    return Collective(kind, axes, whole, group, runs, payload, asynchronous, outer.name, one.op_name or outer.op_name)


def mesh_axes(group: tuple[int, ...], mesh: dict[str, int]) -> tuple[tuple[str, ...], bool]:
    """The axes along which the devices of a group differ, and whether the group contains all devices along them."""
    coordinates = np.stack(np.unravel_index(group, tuple(mesh.values())), 1)
    axes = tuple(name for name, column in zip(mesh, coordinates.T, strict=True) if len(set(column.tolist())) > 1)
    return axes, len(set(group)) == prod(mesh[name] for name in axes)


def replica_group(text: str, devices: int) -> tuple[int, ...]:
    """The first group of an instruction's replica_groups, in any of XLA's notations.

    For source_target_pairs: the cycle or chain of devices that starts at the first source.
    """
    if found := LISTS.search(text):
        rows = [tuple(map(int, row.split(","))) for row in re.findall(r"\{([\d,]+)\}", found[1])]
        if "source_target_pairs" in found[0]:
            return _chain([(source, target) for source, target in rows])
        return rows[0] if rows else tuple(range(devices))
    if found := IOTA.search(text):
        shape, dims = (tuple(map(int, found[i].split(","))) for i in (1, 2))
        order = tuple(map(int, found[3].split(","))) if found[3] else range(len(dims))
        groups = np.arange(prod(dims)).reshape(dims).transpose(tuple(order)).reshape(shape)
        return tuple(groups.reshape(-1, shape[-1])[0].tolist())
    if found := MESH.search(text):
        return _mesh_group(found, devices)
    raise ValueError(f"the replica groups of a collective cannot be read: {text[:400]}")


def _chain(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    target = dict(pairs)
    device = next((a for a, b in pairs if a != b), pairs[0][0])
    chain = [device]
    while chain[-1] in target and target[chain[-1]] not in chain:
        chain.append(target[chain[-1]])
    return tuple(chain)


def _mesh_group(found: re.Match, devices: int) -> tuple[int, ...]:
    """mesh['a'=4,'b'=2] {'a'}: groups along some axes of the compiler's own mesh.

    'a':(2)2 is a part of axis a: the factor of size 2 that follows factors whose product is 2.
    """
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
    order = np.arange(devices)
    if found[2]:  # [2,4]T(1,0), or [8]<=[2,4]T(1,0)
        dims = re.findall(r"\[([\d,]+)\]", found[2])[-1]
        permutation = re.search(r"T\(([\d,]+)\)", found[2])
        order = order.reshape([int(size) for size in dims.split(",")])
        order = order.transpose([int(axis) for axis in permutation[1].split(",")] if permutation else None).reshape(-1)
    grid = order.reshape(tuple(axes.values()))
    index = [slice(0, 1)] * len(axes)
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3]):
        whole = axes[name]
        step = whole // (int(before) * int(size)) if before else 1
        index[list(axes).index(name)] = slice(0, step * int(size), step) if before else slice(None)
    return tuple(grid[tuple(index)].reshape(-1).tolist())
