"""Attention and its gradients, compiled without a TPU: no array of queries by keys, also under a mesh and remat.

Needs libtpu (`make libtpu`).
"""

import json
import math
import re

import pytest

from tests.kernels.on_tpu import compiled_by, mesh_of

BATCH, LENGTH, HEADS = 4, 8192, 8
REMAT = {"none": None, "full": "nothing_saveable", "dots": "dots_with_no_batch_dims_saveable"}
# name: (chips, mesh, inputs of attention, remat)
CASES = {
    "v5e": ("v5e:2x2", {"data": 2, "tensor": 2}, {"slots": 512}, "none"),
    "v5e, documents and memory": ("v5e:2x2", {"data": 4}, {"slots": 500, "packed": True}, "full"),
    "v5p, sharded sequence and window": ("v5p:2x2x1", {"context": 4}, {"window": 256, "size": 128}, "dots"),
}


def compiled(chips: str, sizes: dict, given: dict, remat: str) -> dict:
    """For one device's program: bytes of temporary memory, number of kernel calls, shapes with two long dimensions."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from xfresearch.kernels.attention import attention
    from xfresearch.kernels.masks import Mask
    from xfresearch.sharding.partition import activation_spec

    mesh = mesh_of(chips, **sizes)

    def array(letters, *shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, activation_spec(mesh, letters, shape)))

    size = given.get("size", 64)
    slots = given.get("slots", 0)
    mask = Mask(window=given.get("window", 0))
    q = array("BLHK", BATCH, LENGTH, HEADS, size)
    k = array("BSGK", BATCH, LENGTH, HEADS // 2, size)
    memory = (array("MGK", slots, HEADS // 2, size),) * 2 if slots else None
    ids = array("BL", BATCH, LENGTH, dtype="int32") if given.get("packed") else None

    def loss(q, k, v, memory, ids):
        def run(q, k, v, memory):
            o = attention(q, k, v, memory=memory, q_segments_BL=ids, k_segments_BS=ids, mask=mask, mesh=mesh)
            return o.astype(jnp.float32).sum()

        policy = REMAT[remat] and getattr(jax.checkpoint_policies, REMAT[remat])
        return (run if policy is None else jax.checkpoint(run, policy=policy))(q, k, v, memory)

    program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, k, k, memory, ids).compile()
    text = program.as_text()
    long = LENGTH // sizes.get("context", 1)
    shapes = {shape for shape in re.findall(r"\[([\d,]+)\]", text) if sum(int(n) >= long for n in shape.split(",")) > 1}
    calls = text.count('custom_call_target="tpu_custom_call"')
    return {"bytes": program.memory_analysis().temp_size_in_bytes, "calls": calls, "square": sorted(shapes)}


@pytest.fixture(scope="module")
def programs() -> dict[str, dict]:
    return compiled_by("tests.kernels.test_attention_tpu")


@pytest.mark.parametrize("name", CASES)
def test_no_array_of_queries_by_keys(programs, name):
    """Neither a mask nor logits: no such shape, and less than half a byte of temporary memory for each pair."""
    _, sizes, given, _ = CASES[name]
    pairs = BATCH * HEADS * LENGTH * (LENGTH + given.get("slots", 0)) / math.prod(sizes.values())
    assert programs[name]["square"] == []
    assert programs[name]["bytes"] < pairs / 2
    parts = 2 if given.get("packed") and given.get("slots") else 1
    assert programs[name]["calls"] >= 3 * parts  # forward, dq, dk and dv


if __name__ == "__main__":
    print(json.dumps({name: compiled(*settings) for name, settings in CASES.items()}))
