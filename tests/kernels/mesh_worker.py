"""Run by test_attention_on_mesh.py with 8 simulated devices: prints JSON {case: largest relative error to one device}."""

import json

import jax
from jax.sharding import AxisType, NamedSharding

from tests.kernels.attention_cases import draw, error, plain, value_and_gradients
from xfresearch.kernels.sight import Sight
from xfresearch.kernels.splash_attention import splash
from xfresearch.models.partition import activation_spec

DTYPES = {"splash": "float32"}  # of each implementation: the widest that it has
AXES = ("data", "fsdp", "expert", "tensor", "context")
HALVES = {"data": 2, "tensor": 2, "context": 2}
# name: (implementation, mesh, what is drawn, sight)
CASES = {
    "splash, memory": ("splash", HALVES, {"L": 256, "M": 5}, Sight()),
    "splash, memory, documents, window": ("splash", HALVES, {"L": 250, "M": 5, "segments": True}, Sight(window=40)),
    "splash, one key-value head": ("splash", {"tensor": 4, "context": 2}, {"B": 1, "L": 256, "G": 1}, Sight()),
}


def run(implementation: str, mesh, sight: Sight, segments, arrays):
    q, k, v, memory = arrays
    return splash(q, k, v, memory, segments, sight, q.shape[-1] ** -0.5, mesh)


def case(implementation: str, sizes: dict, drawn: dict, sight: Sight) -> float:
    mesh = jax.make_mesh([sizes.get(axis, 1) for axis in AXES], AXES, axis_types=(AxisType.Auto,) * len(AXES))
    arrays, segments = draw(**drawn, dtype=DTYPES[implementation])
    expected = value_and_gradients(lambda arrays: plain(arrays, segments, sight), arrays)

    def put(x, letters):
        return jax.device_put(x, NamedSharding(mesh, activation_spec(mesh, letters, x.shape)))

    q, k, v, memory = arrays
    memory = memory and tuple(put(m, "MGK") for m in memory)
    placed = (put(q, "BLHK"), put(k, "BSGK"), put(v, "BSGK"), memory)
    found = value_and_gradients(lambda arrays: run(implementation, mesh, sight, segments, arrays), placed)
    return error(jax.device_get(found), expected)


if __name__ == "__main__":
    assert jax.device_count() == 8
    print(json.dumps({name: case(*settings) for name, settings in CASES.items()}))
