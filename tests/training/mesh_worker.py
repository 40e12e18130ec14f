"""test_meshes.py runs this with simulated devices and cases NAME@MESH. It prints JSON {case: result}.

A result compares one update on the mesh with one device, in float64: the errors of the loss, the gradients (in the
optimizer's averages of them, after clipping), their norm before clipping, the new parameters and the panel's figures, and
the kinds of collectives in the compiled update. If the mesh does not support the config, the result is `refused`, with the
reason.
"""

import json
import re
import sys
from dataclasses import replace

import jax
import numpy as np

from tests.contracts.variants import ROOT, tree_error
from tests.tolerances import relative_error
from xfresearch.analysis.panel import Panel
from xfresearch.models import transformer
from xfresearch.options.run_options import MeshConfig
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError
from xfresearch.sharding.mesh import make_mesh
from xfresearch.sharding.partition import batch_sharding, state_shardings
from xfresearch.training.hyperparameters import hyper_of
from xfresearch.training.program import Program

DEVICES = 8
MESHES = {
    "fsdp": MeshConfig(fsdp=8),
    "tensor": MeshConfig(data=4, tensor=2),
    "mixed": MeshConfig(data=2, fsdp=2, tensor=2),
    "context": MeshConfig(data=2, fsdp=2, context=2),
    "all": MeshConfig(fsdp=2, tensor=2, context=2),
    "expert": MeshConfig(data=2, expert=2, fsdp=2),
    "expert-all": MeshConfig(expert=2, tensor=2, context=2),
}
COLLECTIVES = r"= .* (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


def config_of(name: str, mesh: str):
    """A named config at :tiny, in float64, for sequences of 16 tokens and a vocabulary that two devices divide.

    Adam divides a gradient by its size + epsilon. The gradient of a key's bias is zero up to rounding, because softmax
    does not depend on it. The default epsilon 1e-8 would turn a 1e-17 there into 2e-12 of a parameter, on any mesh.
    With 1e-3 the update stays small.
    """
    config = parse(["--config", f"{ROOT}/configs/{name}.py:tiny", "--config.sequence_length=16", "--config.steps=10"])
    model = replace(config.model, vocab_size=264, max_length=16, dtype="float64", param_dtype="float64")
    return replace(config, model=model, mesh=MESHES[mesh], optimizer=replace(config.optimizer, epsilon=1e-3))


def batch_of(config) -> dict:
    """Documents of unequal length in every row, with padding at the end of some rows."""
    random, shape = np.random.default_rng(5), (config.batch_size, config.sequence_length)
    lengths = random.integers(3, config.sequence_length, (config.batch_size, 1))
    at = np.broadcast_to(np.arange(config.sequence_length), shape)
    segments = np.where(at < lengths, 1, 2) * (at < lengths + 4)
    tokens = random.integers(0, 257, shape)
    return {
        "tokens": tokens.astype(np.int32),
        "targets": random.integers(0, 257, shape).astype(np.int32),
        "positions": np.where(at < lengths, at, at - lengths).astype(np.int32),
        "segments": segments.astype(np.int32),
        "weights": (segments > 0).astype(np.float32),
    }


def averages(state: dict) -> list:
    """The optimizer's averages, without its counts, which would hide an error of a small average."""
    return [x for x in jax.tree.leaves(jax.device_get(state["opt"])) if np.issubdtype(x.dtype, np.floating)]


def result(name: str, mesh_name: str) -> dict:
    config = config_of(name, mesh_name)
    config = replace(config, data=replace(config.data, packing="documents"))
    alone, batch = Program(config), batch_of(config)
    state = jax.jit(alone.init)(hyper_of(config))
    try:
        mesh = make_mesh(config)
        shardings = state_shardings(mesh, state, transformer.axes(config.model))
    except UserError as error:
        return {"refused": str(error)}

    expected, expected_metrics = jax.jit(alone.update)(state, batch)
    placed = jax.device_put(state, shardings), jax.device_put(batch, batch_sharding(mesh))
    compiled = jax.jit(Program(config, mesh).update, out_shardings=(shardings, None)).lower(*placed).compile()
    rows = {"tokens": batch["tokens"]}
    on_one, on_mesh = Panel(config.model, rows), Panel(config.model, rows, mesh)
    figures = on_mesh(placed[0]["params"]), on_one(state["params"])
    outcome, metrics = compiled(*placed)
    return {
        "panel": tree_error(*({name: np.nan_to_num(v) for name, v in each.items()} for each in figures)),
        "loss": relative_error(metrics["loss"], expected_metrics["loss"]),
        "gradients": tree_error(averages(outcome), averages(expected)),
        "gradient norm": relative_error(metrics["gradient_norm"], expected_metrics["gradient_norm"]),
        "parameters": tree_error(jax.device_get(outcome["params"]), expected["params"]),
        "collectives": sorted(set(re.findall(COLLECTIVES, compiled.as_text()))),
    }


def main() -> None:
    assert jax.device_count() == DEVICES
    with jax.enable_x64(True):
        print(json.dumps({case: result(*case.split("@")) for case in sys.argv[1:]}))


if __name__ == "__main__":
    main()
