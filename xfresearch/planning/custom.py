"""FLOPs of custom kernels, which the compiler cannot inspect, from their names and the shapes of their operands."""

import re

from xfresearch.planning.hlo import Array, Instruction

ESTIMATE = re.compile(r'cost_estimate[\\"]*:\s*\{([^}]*)\}')
BLOCK = re.compile(r"block_q\W+(\d+)")
# Matrix products over queries and keys (or values) in each kernel of splash attention. The backward kernels compute the
# logits again.
SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}
RANKS = (3, 4)  # dimensions of queries and keys: [heads, length, size], with or without a batch dimension in front


def estimate(instruction: Instruction) -> dict[str, float]:
    """The cost that a kernel states itself: flops, bytes_accessed, ... ({} if it states none)."""
    found = ESTIMATE.search(instruction.text)
    return {name: float(value) for name, value in re.findall(r'(\w+)[\\"]*:[\\"]*(\d+)', found[1])} if found else {}


def kernel_flops(instruction: Instruction, operands: list[Array], routed: float) -> float | None:
    """FLOPs of one run, or None if the kernel is unknown.

    routed: tokens that a device's experts receive if routing is balanced; a token counts once for each of its experts.
    The kernel of a ragged product states the cost of its whole buffer, which has spare capacity.
    """
    stated = estimate(instruction).get("flops")
    if stated:
        return stated * filled(instruction, operands, routed)
    splash = re.match(r"splash_(?:mha|mqa)_(fwd|dq|dkv)", instruction.name)
    if splash:
        block = BLOCK.search(instruction.text)
        return SPLASH[splash[1]] * _attention(operands, int(block[1]) if block else 0)
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


def _attention(operands: list[Array], block: int) -> float:
    """FLOPs of one product of causal attention: all slots, and the blocks of tokens up to and with the diagonal."""
    q, k = [array for array in operands if len(array.shape) in RANKS and array.dtype in ("bf16", "f32")][:2]
    length = q.shape[-2]
    keys = k.shape[-2]
    # The kernel skips fully masked blocks, but computes the blocks on the diagonal in full.
    seen = max(keys - length, 0) + min(length, (length + block) / 2)
    return 2 * q.size * seen
