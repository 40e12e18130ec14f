"""Every collective of a compiled program: which mesh axes it runs over, how often, and how many bytes it moves."""

import re
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from xfresearch.planning.hlo import Computation, Instruction, Program

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
    """One collective instruction. Bytes are per device and run; `group` is the devices, counted through the mesh, of the
    group that device 0 (or the first one named) is in."""

    kind: str
    axes: tuple[str, ...]  # mesh axes along which the devices of a group differ
    whole: bool  # the group is all devices along these axes
    group: tuple[int, ...]
    runs: float  # in one step
    payload: float  # the whole array: gathered, reduced, exchanged or passed on
    asynchronous: bool  # the program goes on while it runs
    name: str
    source: str  # what it is for, in the program that was traced

    @property
    def sent(self) -> float:
        """What one device has to send in one run: all but its own share, and that twice to reduce and gather again."""
        n = len(self.group)
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload
        return self.payload * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


def collectives(program: Program, mesh: dict[str, int], between: str = "", slices: int = 1) -> list[Collective]:
    """All collectives of a step on a mesh with these axes, those that a single device takes part in alone left out.

    between: the axis that is spread over so many slices.
    """
    found, beside = [], program.beside()
    for name, runs in program.runs().items():
        computation = program.computations[name]
        for instruction in computation.instructions.values():
            if "_xla_megascale_transfer_type" in instruction.text and instruction.opcode == "send":
                found.append(_between_slices(instruction, mesh, between, slices, runs))
            for one in _inside(program, instruction):
                made = _collective(one, instruction, mesh, runs)
                if made.kind == "ragged-all-to-all":  # one of the two sides is a buffer with room for more than comes
                    made = replace(made, payload=min(made.payload, _first_operand(computation, one)))
                if len(made.group) > 1:
                    found.append(replace(made, asynchronous=made.asynchronous or name in beside))
    return found


def _between_slices(send: Instruction, mesh: dict[str, int], between: str, slices: int, runs: float) -> Collective:
    """What a slice's hosts exchange with the others': a pair of send and recv that names the collective it stands for.

    Its payload is the device's own share: the slice has scattered before, and gathers after it, by collectives of its own.
    """
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', send.text)[1].lower().replace("_", "-")
    kind = kind if kind in KINDS else "collective-permute"
    step = mesh[between] // slices  # devices of one slice along the axis
    grid = np.arange(prod(mesh.values())).reshape(tuple(mesh.values()))
    index = tuple(slice(None, None, step) if axis == between else 0 for axis in mesh)
    group = tuple(grid[index].reshape(-1).tolist())
    return Collective(kind, (between,), step == 1, group, runs, send.outputs[0].bytes, True, send.name, send.op_name)


def _first_operand(computation: Computation, one: Instruction) -> float:
    return computation.instructions[one.operands[0]].outputs[0].bytes


def _inside(program: Program, instruction: Instruction) -> list[Instruction]:
    """The collectives that an instruction starts: itself, or those fused into it.

    A pair of start and done counts once. A TPU spreads an asynchronous one over several fusions, which all repeat it: the
    one that holds its start counts.
    """
    fused = program.fused(instruction)
    if fused is None:
        return [instruction] if kind_of(instruction.opcode) else []
    found = [one for inner in fused.instructions.values() for one in _inside(program, inner)]
    marks = " ".join(one.text for one in fused.instructions.values() if "AsyncCollective" in one.text)
    if "AsyncCollectiveStart" in marks:
        return found
    return [one for one in found if "AsyncCollectiveDone" not in marks and "chain_id=" not in one.text]


def kind_of(opcode: str) -> str | None:
    """The kind of collective that an instruction starts, or None."""
    base = opcode.removesuffix("-start")
    return base if base in KINDS else None


def _collective(one: Instruction, outer: Instruction, mesh: dict[str, int], runs: float) -> Collective:
    kind, started = kind_of(one.opcode), one.opcode.endswith("-start")
    group = replica_group(one.text, prod(mesh.values()))
    sizes = [array.bytes for array in one.outputs]
    payload = sum(sizes)
    if kind == "all-gather" and started:  # (operands, results)
        payload *= len(group) / (len(group) + 1)
    if kind == "collective-permute" and started:  # (operand, result, two counters)
        payload = sizes[0]
    if kind == "reduce-scatter":
        payload *= len(group)
    if kind == "all-reduce" and "all-reduce-scatter" in outer.text:  # a TPU's: all but a device's own share is dropped
        kind = "reduce-scatter"
    axes, whole = mesh_axes(group, mesh)
    asynchronous = started or (outer is not one and kind != "reduce-scatter") or "async" in outer.name
    return Collective(kind, axes, whole, group, runs, payload, asynchronous, outer.name, one.op_name or outer.op_name)


def mesh_axes(group: tuple[int, ...], mesh: dict[str, int]) -> tuple[tuple[str, ...], bool]:
    """The axes along which the devices of a group differ, and whether it holds all devices along them."""
    places = np.stack(np.unravel_index(group, tuple(mesh.values())), 1)
    axes = tuple(name for name, column in zip(mesh, places.T, strict=True) if len(set(column.tolist())) > 1)
    return axes, len(set(group)) == prod(mesh[name] for name in axes)


def replica_group(text: str, devices: int) -> tuple[int, ...]:
    """The first group of an instruction's replica_groups, in any of the forms that they are written in.

    Of source_target_pairs, the devices that a round trip from the first source passes: its cycle or chain.
    """
    if found := LISTS.search(text):
        rows = [tuple(map(int, row.split(","))) for row in re.findall(r"\{([\d,]+)\}", found[1])]
        if "source_target_pairs" in found[0]:
            return _chain(rows)
        return rows[0] if rows else tuple(range(devices))
    if found := IOTA.search(text):
        shape, dims = (tuple(map(int, found[i].split(","))) for i in (1, 2))
        order = tuple(map(int, found[3].split(","))) if found[3] else range(len(dims))
        groups = np.arange(prod(dims)).reshape(dims).transpose(tuple(order)).reshape(shape)
        return tuple(groups.reshape(-1, shape[-1])[0].tolist())
    if found := MESH.search(text):
        return _mesh_group(found, devices)
    raise ValueError(f"the groups of a collective cannot be read: {text[:400]}")


def _chain(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    target, here = dict(pairs), next((a for a, b in pairs if a != b), pairs[0][0])
    chain = [here]
    while (here := target.get(here)) is not None and here not in chain:
        chain.append(here)
    return tuple(chain)


def _mesh_group(found: re.Match, devices: int) -> tuple[int, ...]:
    """mesh['a'=4,'b'=2] {'a'}: groups along some axes of a mesh of the compiler's own; 'a':(2)2 is a part of an axis, the
    one of size 2 that comes after parts of product 2."""
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
    order = np.arange(devices)
    if found[2]:  # [2,4]T(1,0), or [8]<=[2,4]T(1,0)
        dims = re.findall(r"\[([\d,]+)\]", found[2])[-1]
        turn = re.search(r"T\(([\d,]+)\)", found[2])
        order = order.reshape([int(size) for size in dims.split(",")])
        order = order.transpose([int(axis) for axis in turn[1].split(",")] if turn else None).reshape(-1)
    grid = order.reshape(tuple(axes.values()))
    index = [slice(0, 1)] * len(axes)
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3]):
        whole = axes[name]
        step = whole // (int(before) * int(size)) if before else 1
        index[list(axes).index(name)] = slice(0, step * int(size), step) if before else slice(None)
    return tuple(grid[tuple(index)].reshape(-1).tolist())
