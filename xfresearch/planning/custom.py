"""FLOPs of kernels that the compiler calls but cannot look into, from their names and the shapes of what they are given."""

import re

from xfresearch.planning.hlo import Array, Instruction

ESTIMATE = re.compile(r'cost_estimate[\\"]*:\s*\{([^}]*)\}')
BLOCK = re.compile(r"block_q\W+(\d+)")  # masked blocks are skipped, those on the diagonal are not
# Products of queries, keys and values' size that each kernel of splash attention computes; the backward ones need the
# logits again.
SPLASH = {"fwd": 2, "dq": 3, "dkv": 4}
LARGE = (3, 4)  # dimensions of queries and keys: [heads, length, size], perhaps with a batch in front


def estimate(instruction: Instruction) -> dict[str, float]:
    """What a kernel itself says it costs: flops, bytes_accessed, ... ({} where it says nothing)."""
    found = ESTIMATE.search(instruction.text)
    return {name: float(value) for name, value in re.findall(r'(\w+)[\\"]*:[\\"]*(\d+)', found[1])} if found else {}


def kernel_flops(instruction: Instruction, operands: list[Array], routed: float) -> float | None:
    """FLOPs of one run; None of a kernel that is not known.

    routed: tokens that come to a device's experts where they come to all alike, each as often as it has experts. The
    kernel of a ragged product states what it would do with its whole buffer, which has room for more.
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
    """Bytes that a kernel itself says it moves, or None; of a ragged product's buffer, the rows that come."""
    stated = estimate(instruction).get("bytes_accessed")
    if not stated:
        return None
    weights = sum(array.bytes for array in operands if len(array.shape) == 3)
    share = filled(instruction, operands, routed)
    return stated if share == 1 else (stated - weights) * share + weights


def filled(instruction: Instruction, operands: list[Array], routed: float) -> float:
    """The share of a ragged product's buffer that holds tokens; 1 of other kernels."""
    if not re.search("ragged-dot|gmm", instruction.name):  # gmm, tgmm: those of megablox
        return 1
    return min(1, routed / max((array.shape[0] for array in operands if len(array.shape) == 2), default=routed or 1))


def _attention(operands: list[Array], block: int) -> float:
    """FLOPs of one product of causal attention: all of the memory, and of the tokens the blocks up to the diagonal."""
    q, k = [array for array in operands if len(array.shape) in LARGE and array.dtype in ("bf16", "f32")][:2]
    length, keys = q.shape[-2], k.shape[-2]
    seen = max(keys - length, 0) + min(length, (length + block) / 2)
    return 2 * q.size * seen
