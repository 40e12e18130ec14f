"""Counts the work of each instruction of a compiled program: FLOPs of matrix products, and bytes to and from HBM.

An instruction reads its operands from HBM and writes its outputs to HBM, except arrays that the compiler places in
on-chip memory. If it only slices an operand, it reads the slice; if it only updates an operand in place, it reads and
writes the update. Elementwise operations count no FLOPs, because their bytes decide their time. The compiler cannot inspect
a custom kernel (Pallas): it states its own cost, or its name and the shapes of its operands tell.
"""

import math
import re
from dataclasses import dataclass
from math import prod
from typing import Any

from xfresearch.planning.collectives import Collective, kind_of
from xfresearch.planning.hlo import Array, Computation, Instruction, Program, match_of

# Instructions without work: names for existing arrays, containers, and the ends of operations that count at their
# start.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
FREE |= {
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
    "async-start",
    "call-start",
    "async-update",
    "async-done",
    "domain",
}
SLICES = {"dynamic-slice", "slice", "gather"}
STARTED_SLICES = {f"{name}-start" for name in SLICES}
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')  # of a dot or a call of cuBLAS
WINDOW = re.compile(r"window=\{([^}]*)\}")
LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|__gpu\$xla\.gpu\.triton|mosaic_gpu|__cudnn\$fmha\w*)"')

ESTIMATE = re.compile(r'cost_estimate[\\"]*:\s*\{([^}]*)\}')
BLOCKS = {side: re.compile(rf"block_{side}(?:_dq|_dkv)?\W+(\d+)") for side in ("q", "kv")}  # of queries, of keys
# Matrix products over queries and keys (or values) in each kernel of splash attention. The backward kernels compute the
# logits again.
SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}
RANKS = (3, 4)  # dimensions of queries and keys: [heads, length, size], with or without a batch dimension in front


@dataclass(frozen=True)
class Work:
    name: str
    source: str
    runs: float
    flops: float  # per run and device
    bytes: float  # to and from HBM, per run and device


@dataclass(frozen=True)
class Account:
    """What one step of a plan takes, as counted in its compiled program (plans.py) or by formula (formula.py)."""

    works: list[Work]
    collectives: list[Collective]
    memory: dict[str, float]  # bytes per device by kind
    kept: list[tuple[str, str, float]]  # activations saved for the backward pass: (operation, shape, bytes per device)
    state: Any
    flops: float  # of one step on all devices, including recomputation


def work(program: Program, routed: float = 0, causal: bool = True) -> list[Work]:
    """The work of every instruction of a step that has any, including collectives (for the bytes they move in HBM).

    routed, causal: as in `kernel_flops`.
    """
    parts = []
    for name, runs in program.runs().items():
        computation = program.computations[name]
        for instruction in computation.instructions.values():
            if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
                continue
            flops = _flops(program, computation, instruction, routed, causal)
            moved = _bytes(program, computation, instruction, routed)
            if flops or moved:
                parts.append(Work(instruction.name, instruction.op_name, runs, flops, moved))
    return parts


def _flops(
    program: Program, computation: Computation, instruction: Instruction, routed: float, causal: bool
) -> float:
    if fused := program.fused(instruction):
        return sum(_flops(program, fused, inner, routed, causal) for inner in fused.instructions.values())
    if instruction.opcode == "dot":
        return _dot(computation, instruction)
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if "__cublas$" in instruction.text:
        return _dot(computation, instruction)
    if instruction.opcode == "custom-call" and _KERNEL.search(instruction.text):
        return kernel_flops(instruction, computation.first_arrays(instruction), routed, causal) or 0
    return 0


def unknown_kernels(program: Program) -> list[str]:
    """Names of the kernels whose FLOPs are unknown."""
    unknown = set()
    for name in program.runs():
        computation = program.computations[name]
        for one in computation.instructions.values():
            kernel = one.opcode == "custom-call" and _KERNEL.search(one.text)
            if kernel and kernel_flops(one, computation.first_arrays(one), 0) is None:
                unknown.add(re.sub(r"[.\d]+$", "", one.name))
    return sorted(unknown)


def _dot(computation: Computation, instruction: Instruction) -> float:
    left = computation.operand(instruction, 0)
    contracted = CONTRACTED.search(instruction.text)
    sizes = [left.shape[int(i)] for i in re.findall(r"\d+", contracted[1])] if contracted else []
    return 2 * instruction.outputs[0].size * prod(sizes)


def _convolution(computation: Computation, instruction: Instruction) -> float:
    """2 per multiply-add, without those on padding and on the zeros of a dilated input.

    TPU matrix products are convolutions too: a batch dimension is a window in which only one position is not zero.
    """
    left, right = (computation.operand(instruction, i) for i in (0, 1))
    a, b, out = match_of(LABELS, instruction.text).groups()
    found = WINDOW.search(instruction.text)
    window = dict(re.findall(r"(\w+)=([\w\-]+)", found[1])) if found else {}
    positions = 1
    for i in range(len(out) - 2):
        label = str(i)
        sizes = left.shape[a.index(label)], right.shape[b.index(label)], instruction.outputs[0].shape[out.index(label)]
        options = (_entry(window, name, i) for name in ("stride", "pad", "lhs_dilate", "rhs_dilate"))
        positions *= _valid(*sizes, *options)
    features = right.shape[b.index("i")] * right.shape[b.index("o")]  # input features are those of one group
    return 2 * positions * left.shape[a.index("b")] * features / _batch_groups(instruction)


def _batch_groups(instruction: Instruction) -> int:
    found = re.search(r"batch_group_count=(\d+)", instruction.text)
    return int(found[1]) if found else 1


def _entry(window: dict, name: str, dimension: int) -> int:
    """An entry of `window={size=1x8 pad=0_0x7_7 ...}` for one dimension; for pad, the low end."""
    if name not in window:
        return 0 if name == "pad" else 1
    return int(window[name].split("x")[dimension].split("_")[0])


def _valid(inputs: int, kernel: int, outputs: int, stride: int, pad: int, base: int, dilation: int) -> int:
    """The number of pairs of an output position and a kernel position that read an element of the input."""
    extent = (inputs - 1) * base + 1  # of the dilated input
    return sum(
        0 <= at < extent and at % base == 0
        for o in range(outputs)
        for at in range(o * stride - pad, o * stride - pad + kernel * dilation, dilation)
    )


def _bytes(program: Program, computation: Computation, instruction: Instruction, routed: float) -> float:
    if instruction.opcode == "custom-call":
        return _custom(computation, instruction, routed)
    if instruction.opcode == "fusion":
        return _fusion(program, computation, instruction)
    if instruction.opcode in ("copy-start", "collective-permute-start", "all-gather-start"):  # (source, target, ...)
        return sum(_hbm(array) for array in instruction.outputs[:2])
    if instruction.opcode in STARTED_SLICES:  # (source, slice, ...)
        return instruction.outputs[1].bytes + _hbm(instruction.outputs[1])
    if instruction.opcode in SLICES:
        return 2 * sum(map(_hbm, instruction.outputs))
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _hbm(computation.operand(instruction, 1))
    return _moved(computation, instruction)


def _hbm(array: Array) -> float:
    return 0 if array.fast else array.bytes


def _moved(computation: Computation, instruction: Instruction) -> float:
    """Bytes of an instruction that reads its operands and writes its outputs whole."""
    return sum(map(_hbm, [*instruction.outputs, *computation.read_by(instruction)]))


def _custom(computation: Computation, instruction: Instruction, routed: float) -> float:
    if '"AllocateBuffer"' in instruction.text:
        return 0
    stated = kernel_bytes(instruction, computation.first_arrays(instruction), routed)
    return stated or _moved(computation, instruction)


def _fusion(program: Program, computation: Computation, instruction: Instruction) -> float:
    fused = program.fused(instruction)
    assert fused, f"{instruction.opcode} is no fusion"
    users: dict[str, list[Instruction]] = {}
    for inner in fused.instructions.values():
        for name in inner.operands:
            users.setdefault(name, []).append(inner)
    total = 0.0
    for parameter, operand in zip(fused.parameters(), instruction.operands, strict=True):
        outer = computation.instructions.get(operand)
        if outer and not outer.outputs[0].fast:
            total += _used(parameter.name, users, outer.outputs[0].bytes, fused)
    return total + sum(_written(fused, name, users) for name in _roots(fused))


def _used(name: str, users: dict, whole: float, fused: Computation) -> float:
    """Bytes that a fusion reads of one operand: all, unless every use slices the operand or updates it in place."""
    total = 0.0
    for user in users.get(name, ()):
        if user.opcode == "tuple" or kind_of(user.opcode) or "AsyncCollective" in user.text:
            continue  # passed through, or moved by a collective that runs at the same time as the fusion
        if user.opcode in ("bitcast", "reshape", "copy") and not user.root:
            total += _used(user.name, users, whole, fused)
        elif user.opcode in SLICES and user.operands[0] == name:
            total += user.outputs[0].bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue
        else:
            return whole
    return min(total, whole)


def _roots(fused: Computation) -> list[str]:
    root = fused.root
    return root.operands if root.opcode == "tuple" else [root.name]


def _written(fused: Computation, name: str, users: dict) -> float:
    instruction = fused.instructions[name]
    if instruction.outputs[0].fast or instruction.opcode == "parameter" or "AsyncCollective" in instruction.text:
        return 0
    while instruction.opcode == "bitcast" and instruction.operands[0] in fused.instructions:
        instruction = fused.instructions[instruction.operands[0]]
    if instruction.opcode == "dynamic-update-slice":
        return fused.instructions[instruction.operands[1]].outputs[0].bytes
    return sum(array.bytes for array in instruction.outputs)


def estimate(instruction: Instruction) -> dict[str, float]:
    """The cost that a kernel states itself: flops, bytes_accessed, ... ({} if it states none)."""
    found = ESTIMATE.search(instruction.text)
    return {name: float(value) for name, value in re.findall(r'(\w+)[\\"]*:[\\"]*(\d+)', found[1])} if found else {}


def kernel_flops(instruction: Instruction, operands: list[Array], routed: float, causal: bool = True) -> float | None:
    """FLOPs of one run, or None if the kernel is unknown.

    routed: tokens that a device's experts receive if routing is balanced; a token counts once for each of its experts.
    The kernel of a ragged product states the cost of its whole buffer, which has spare capacity.
    causal: whether attention is causal.
    """
    stated = estimate(instruction).get("flops")
    if stated:
        return stated * filled(instruction, operands, routed)
    splash = re.match(r"splash_(?:mha|mqa)_(fwd|dq|dkv)", instruction.name)
    if splash:
        sizes = {side: int(found[1]) for side, each in BLOCKS.items() if (found := each.search(instruction.text))}
        return SPLASH[splash[1]] * _attention(operands, sizes, splash[1], causal)
    return None


def kernel_bytes(instruction: Instruction, operands: list[Array], routed: float) -> float | None:
    """Bytes that a kernel states it moves, or None. Of a ragged product's buffer, only the rows in use count."""
    stated = estimate(instruction).get("bytes_accessed")
    if not stated:
        return None
    weights = sum(array.bytes for array in operands if len(array.shape) == 3)
    share = filled(instruction, operands, routed)
    return stated if share == 1 else (stated - weights) * share + weights


def filled(instruction: Instruction, operands: list[Array], routed: float) -> float:
    """The share of a ragged product's buffer that contains tokens; 1 for other kernels."""
    if not re.search("ragged-dot|gmm", instruction.name):  # gmm and tgmm are the kernels of megablox
        return 1
    return min(1, routed / max((array.shape[0] for array in operands if len(array.shape) == 2), default=routed or 1))


def _attention(operands: list[Array], blocks: dict[str, int], kind: str, causal: bool) -> float:
    """FLOPs of one product of attention. Keys are [slots; tokens], or on several devices those of earlier tokens as well.
    Slots alone, which are fewer than the queries, are seen by all queries. The kernel skips blocks without a visible key,
    but computes the blocks on the edges in full."""
    q, k = [array for array in operands if len(array.shape) in RANKS and array.dtype in ("bf16", "f32")][:2]
    length, keys = q.shape[-2], k.shape[-2]
    before = keys - length
    if not causal or before < 0:
        return 2 * q.size * keys
    block = min(blocks.get("q", 0), length)
    most = min(keys, _reach(operands, blocks, kind, keys / length))
    window = most - before  # of the tokens; the first queries of a sequence see fewer
    seen = before + window * (1 - (window - block) / (2 * length)) if window > block else most
    return 2 * q.size * seen


def _reach(operands: list[Array], blocks: dict[str, int], kind: str, keys_per_query: float) -> float:
    """The most keys that a block of queries sees. The kernel's first operand is a grid [..., blocks of queries, blocks of
    keys]. It has as many columns as the row with most visible blocks, in 'dkv' as many rows as the column with most."""
    grid = operands[0].shape if operands and operands[0].dtype.startswith("s") and blocks.keys() == BLOCKS.keys() else ()
    if len(grid) not in RANKS:
        return math.inf
    return grid[-2] * blocks["q"] * keys_per_query if kind == "dkv" else grid[-1] * blocks["kv"]
