"""test_attention_on_mesh.py runs this with 8 simulated devices and the names of cases. Prints JSON {case: Result}."""

import json
import re
import sys
from typing import NamedTuple

import jax
import numpy as np
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding

from tests.contracts.passes import forward
from tests.contracts.variants import ALL, in_float64, random_params, tokens_for
from tests.kernels import cudnn_stand_in
from tests.kernels.attention_cases import draw, error, plain, scaled, value_and_gradients
from xfresearch.kernels import ring_attention, splash_attention
from xfresearch.kernels.chunked_attention import chunked
from xfresearch.kernels.cudnn_attention import cudnn
from xfresearch.kernels.masks import Mask, Slots
from xfresearch.kernels.splash_attention import splash
from xfresearch.models import transformer
from xfresearch.models.context import Execution
from xfresearch.sharding.partition import activation_spec, param_shardings

DTYPES = {"splash": "float32", "ring of splash": "float32", "ring": "float64", "chunked": "float64", "plain": "float64"}
DTYPES |= {"cudnn": "bfloat16", "cudnn with biases": "bfloat16"}
AXES = ("data", "fsdp", "expert", "tensor", "context")
HALVES = {"data": 2, "tensor": 2, "context": 2}
PACKED = {"L": 64, "M": 5, "own": True, "segments": True}
# name: (implementation, mesh, arguments of draw, mask)
CASES = {
    "splash, memory": ("splash", HALVES, {"L": 256, "M": 5}, Mask()),
    "splash, memory, documents, window": ("splash", HALVES, PACKED | {"L": 250}, Mask(window=40)),
    "splash, one key-value head": ("splash", {"tensor": 4, "context": 2}, {"B": 1, "L": 256, "G": 1}, Mask()),
    "ring": ("ring", {"context": 8}, {"L": 64}, Mask()),
    "ring, memory, documents": ("ring", {"tensor": 2, "context": 4}, PACKED, Mask()),
    "ring, memory, documents, window": ("ring", HALVES | {"context": 2}, PACKED, Mask(window=40)),
    "ring, short window": ("ring", {"context": 8}, {"L": 64, "G": 1, "V": 6, "M": 3}, Mask(window=9)),
    "ring, not causal": ("ring", {"data": 2, "context": 4}, PACKED, Mask(causal=False)),
    "ring of splash, memory, documents": ("ring of splash", HALVES, {"L": 256, "M": 5, "segments": True}, Mask()),
    "ring of splash, window": (
        "ring of splash",
        {"context": 2, "tensor": 4},
        {"B": 1, "L": 512, "G": 1},
        Mask(window=40),
    ),
    "chunked, memory, documents, window": ("chunked", HALVES, PACKED, Mask(window=40)),
    "plain, memory, documents, window": ("plain", HALVES, PACKED, Mask(window=40)),
    "cudnn, one key-value head": ("cudnn", {"data": 2, "tensor": 4}, {"L": 64, "G": 1}, Mask(window=40)),
    "cudnn, memory": ("cudnn", {"fsdp": 2, "tensor": 2}, {"L": 64, "M": 5}, Mask()),
    "cudnn, biases, documents": ("cudnn with biases", {"fsdp": 2, "tensor": 2}, {"L": 64, "M": 5, "segments": True}, Mask()),
}
# name: (kernel, mesh, named config)
MODELS = {
    "llama by ring": ("ring", HALVES, "configs/llama.py"),
    "all-attention by ring": ("ring", {"context": 4, "fsdp": 2}, "configs/all_attention.py"),
    "a learned sink by ring": ("ring", HALVES, "attention.sink=learned"),
    "llama by plain": ("plain", HALVES, "configs/llama.py"),
}


def run(implementation: str, mesh, mask: Mask, segments, arrays):
    q, k, v, memory = arrays
    if implementation == "cudnn with biases":
        scaled_q, memory = scaled(q, memory)
        bias = of_query(q, np.arange(q.shape[1])[:, None] - np.arange(q.shape[1]))
        return cudnn(scaled_q, k, v, memory, segments, mask, mesh, bias)
    if implementation == "plain":
        return plain(arrays, segments, mask, mesh=mesh)
    function = {"splash": splash, "chunked": chunked, "cudnn": cudnn}.get(implementation, ring_attention.ring)
    ring_attention.platform = lambda mesh: "tpu" if implementation == "ring of splash" else "cpu"
    q, memory = scaled(q, memory)
    return function(q, k, v, memory, segments, mask, mesh)


def cudnn_on_cpu() -> None:
    """Replaces cuDNN's kernels on CPU, so that only JAX's sharding of them is tested."""
    from jax._src.cudnn import fused_attention_stablehlo as sdpa

    sdpa.check_cudnn_version = lambda: 91000
    replaced = {sdpa._dot_product_attention_fwd_p: cudnn_stand_in.forward}
    replaced |= {sdpa._dot_product_attention_bwd_p: cudnn_stand_in.backward}
    for primitive, function in replaced.items():
        mlir.register_lowering(primitive, mlir.lower_fun(function), platform="cpu")


def of_query(q_BLHK, distance_LS):
    """A bias [B, H, L, S]."""
    return 0.1 * q_BLHK.sum(-1).swapaxes(1, 2)[..., None] * distance_LS


class Result(NamedTuple):
    error: float  # largest relative error of the output and the gradients, against one device
    gathers: int  # all-gathers in the compiled program of output and gradients
    passes: int  # collective-permutes in that program


def compare(function, placed, expected) -> Result:
    step = jax.jit(lambda arrays: value_and_gradients(function, arrays)).lower(placed).compile()
    counts = [len(re.findall(rf" {name}(-start)?\(", step.as_text())) for name in ("all-gather", "collective-permute")]
    return Result(error(jax.device_get(step(placed)), expected), *counts)


def mesh_of(sizes: dict):
    return jax.make_mesh([sizes.get(axis, 1) for axis in AXES], AXES, axis_types=(AxisType.Auto,) * len(AXES))


def kernel_result(implementation: str, sizes: dict, drawn: dict, mask: Mask) -> Result:
    mesh = mesh_of(sizes)
    arrays, segments = draw(**drawn, dtype=DTYPES[implementation])
    named = {"bias": of_query} if implementation == "cudnn with biases" else {}
    expected = value_and_gradients(lambda arrays: plain(arrays, segments, mask, **named), arrays)

    def put(x, letters):
        return jax.device_put(x, NamedSharding(mesh, activation_spec(mesh, letters, x.shape)))

    q, k, v, memory = arrays
    if memory is not None:
        memory_q = None if memory.query is None else put(memory.query, "BLHK")
        memory = Slots(memory_q, put(memory.key, "MGK"), put(memory.value, "MGK"))
    placed = (put(q, "BLHK"), put(k, "BLGK"), put(v, "BLGK"), memory)
    return compare(lambda arrays: run(implementation, mesh, mask, segments, arrays), placed, expected)


def model_result(kernel: str, sizes: dict, name: str) -> Result:
    """A whole model in float64, with scanned layers and `kernel` in every block."""
    config = in_float64(ALL[name])
    params = random_params(config)
    tokens_BL = tokens_for(config, batch=4, length=16)
    segments_BL = np.repeat([[1] * 9 + [2] * 7], 4, 0).astype(np.int32)
    expected = value_and_gradients(lambda p: forward(config, p, tokens_BL, segments_BL=segments_BL)[0], params)
    mesh = mesh_of(sizes)
    placed = jax.device_put(params, param_shardings(mesh, params, transformer.axes(config)))
    execution = Execution(attention_kernel=kernel)

    def sharded(params):
        return forward(config, params, tokens_BL, "scan", segments_BL=segments_BL, mesh=mesh, execution=execution)[0]

    return compare(sharded, placed, expected)


def result(name: str) -> Result:
    function, *settings = (kernel_result, *CASES[name]) if name in CASES else (model_result, *MODELS[name])
    with jax.enable_x64(function is model_result or DTYPES[settings[0]] == "float64"):
        return function(*settings)


if __name__ == "__main__":
    assert jax.device_count() == 8
    splash_attention.INTERPRET = True
    cudnn_on_cpu()
    print(json.dumps({name: result(name)._asdict() for name in sys.argv[1:]}))
