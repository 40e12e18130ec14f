"""FLOPs of custom kernels, which the compiler cannot inspect, from their names and the shapes of their operands."""

import math
import re

from xfresearch.planning.hlo import Array, Instruction

ESTIMATE = re.compile(r'cost_estimate[\\"]*:\s*\{([^}]*)\}')
BLOCKS = {side: re.compile(rf"block_{side}(?:_dq|_dkv)?\W+(\d+)") for side in ("q", "kv")}  # of queries, of keys
# Matrix products over queries and keys (or values) in each kernel of splash attention. The backward kernels compute the
# logits again.
SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}
RANKS = (3, 4)  # dimensions of queries and keys: [heads, length, size], with or without a batch dimension in front


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
