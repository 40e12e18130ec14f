"""Experts over devices: one update on a mesh of 8 simulated devices is that of one device, and what moves between them."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.contracts.variants import in_float64, random_params, tree_error
from tests.contracts.variants import model as resolved
from tests.tolerances import TOLERANCE, relative_error
from tests.training.test_step import make_batch
from xfresearch.config_io import parse
from xfresearch.models import transformer
from xfresearch.models.context import Context
from xfresearch.training.optimizer import make_optimizer
from xfresearch.training.sharding import batch_sharding, param_shardings, state_shardings
from xfresearch.training.step import init_state, make_train_step

ROOT = Path(__file__).parent.parent.parent
AXES = ("data", "fsdp", "expert", "tensor", "context")
LENGTHS = [16, 7, 1, 16, 11, 5, 14, 9]  # tokens of each sequence; padding after them
DENSE = {"blocks.main.feed_forward.kind": "swiglu"}
MOE = "blocks.main.feed_forward.moe."
CAPACITY = {MOE + "capacity": 0.75}
BIAS = {MOE + "balance": "bias", MOE + "scores": "sigmoid", MOE + "shared": 1}
CHOSEN = {  # by experts
    MOE + "routing": "expert_choice", MOE + "capacity": 1.0, MOE + "renormalise": False, MOE + "balance": "none",
    "causal": False,
}  # fmt: skip
KINDS = {
    "dropless": {},
    "capacity": CAPACITY,
    "bias": BIAS,
    "capacity-bias": CAPACITY | BIAS,
    "chosen": CHOSEN,
    "dense": DENSE,
}
DAILY = [
    "layer dropless expert=2 fsdp=2 tensor=2",
    "layer capacity-bias expert=2 fsdp=2 context=2",
]
LONG = [
    "moe dropless expert=2 fsdp=2 tensor=2",
    "mixtral_8x7b capacity-bias expert=2 fsdp=2 context=2",
    "llama dense fsdp=8",
    "moe dropless expert=8",
    "moe dropless expert=4 context=2",
    "moe dropless data=2 expert=2 fsdp=2",
    "moe dropless fsdp=4 tensor=2",
    "moe bias expert=4 tensor=2",
    "moe bias expert=2 tensor=2 context=2",
    "moe capacity expert=8",
    "moe capacity expert=2 fsdp=2 tensor=2",
    "moe capacity data=2 expert=4",
    "moe capacity fsdp=2 context=4",
    "moe capacity-bias expert=4 context=2",
    "moe chosen expert=2 fsdp=2 context=2",
    "moe chosen expert=4 tensor=2",
    "mixtral_8x7b dropless expert=8",
    "mixtral_8x7b dropless expert=2 fsdp=2 context=2",
    "mixtral_8x7b bias expert=2 fsdp=2 tensor=2",
    "mixtral_8x7b capacity expert=4 tensor=2",
]


def config_of(model: str, kind: str):
    """Plain descent at rate 1 without clipping or decay: an update is the gradient."""
    options = {
        "sequence_length": 16, "training.layers": "scan", "data.packing": "documents",
        "optimizer.kind": "sgd", "optimizer.learning_rate": 1.0, "optimizer.warmup": 0,
        "optimizer.clip": 0.0, "optimizer.weight_decay": 0.0,
    }  # fmt: skip
    config = parse([f"--config=configs/{model}.py:tiny", *(f"--config.{k}={v}" for k, v in options.items())])
    losses = {"vocab_size": 64, MOE + "z_loss": 0.1, MOE + "balance_loss": 0.1}
    return replace(config, model=in_float64(resolved(losses | KINDS[kind], config.model)))


def start(config):
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = init_state(config, optimizer)
    return optimizer, state | {"params": random_params(config.model)}, make_batch(LENGTHS, L=16, V=64)


@cache
def on_one_device(model: str, kind: str):
    config = config_of(model, kind)
    optimizer, state, batch = start(config)
    return jax.jit(make_train_step(config, optimizer))(state, batch)


def update(model: str, kind: str, mesh) -> dict:
    """Relative errors of an update on a mesh and of its metrics, and what the compiled program moves between devices."""
    config = config_of(model, kind)
    expected, metrics = on_one_device(model, kind)
    optimizer, state, batch = start(config)
    where = state_shardings(mesh, state)
    placed = jax.device_put(state, where), jax.device_put(batch, batch_sharding(mesh))
    step = jax.jit(make_train_step(config, optimizer, mesh), out_shardings=(where, None)).lower(*placed).compile()
    found, more = step(*placed)
    moved = [jax.tree.map(lambda a, b: np.asarray(a) - b, new["params"], state["params"]) for new in (found, expected)]
    errors = {k: max(jax.tree.leaves(jax.tree.map(relative_error, more[k], metrics[k]))) for k in metrics}
    drops = float(sum(map(np.sum, jax.tree.leaves(metrics.get("router_drops")))))
    return {
        "errors": {"update": tree_error(*moved), **errors},
        "drops": drops,
        "moves": collectives(step.as_text(), mesh),
    }


def layer(kind: str, mesh) -> dict:
    """The same of one layer and its gradients."""
    config = replace(config_of("moe", kind).model, depth=1)
    params, segments_BL = random_params(config), make_batch(LENGTHS, L=16)["segments"]
    x_BLD, dy_BLD = np.random.default_rng(0).standard_normal((2, 8, 16, config.width))

    def loss(params, x_BLD, mesh):
        first = transformer.unstack(transformer.bind(config, params).blocks["main"], 1)[0].feed_forward
        y_BLD, _, aux = first(x_BLD, Context(None, segments_BL, mesh=mesh))
        return (y_BLD * dy_BLD).sum() + sum(x.sum() for x in aux.losses.values()), (y_BLD, aux.statistics)

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    expected = run(params, x_BLD, None)
    placed = jax.device_put(params, param_shardings(mesh, params)), jax.device_put(x_BLD, batch_sharding(mesh))
    program = run.lower(*placed, mesh).compile()
    (gradients, (y_BLD, statistics)), (expected_gradients, (expected_BLD, sums)) = program(*placed), expected
    errors = {name: relative_error(value, sums[name]) for name, value in statistics.items()}
    errors |= {"gradients": tree_error(jax.device_get(gradients), expected_gradients)}
    errors |= {"output": relative_error(y_BLD, expected_BLD)}
    return {"errors": errors, "drops": float(sums["router_drops"].sum()), "moves": collectives(program.as_text(), mesh)}


def run(case: str) -> dict:
    model, kind, *sizes = case.split()
    sizes = {axis: int(size) for axis, size in (text.split("=") for text in sizes)}
    mesh = jax.make_mesh([sizes.get(axis, 1) for axis in AXES], AXES, axis_types=(AxisType.Auto,) * 5)
    return layer(kind, mesh) if model == "layer" else update(model, kind, mesh)


def collectives(text: str, mesh) -> list:
    """[kind, elements of its largest result, whether it goes along `expert` alone] of each collective in a program."""
    along_expert = np.moveaxis(np.arange(8).reshape(mesh.devices.shape), AXES.index("expert"), -1)
    groups = str(along_expert.reshape(-1, mesh.shape["expert"]).tolist()).replace(" ", "")
    groups = groups.replace("[", "{").replace("]", "}")
    found = []
    for shapes, kind, rest in re.findall(r"= (.*?) (all-gather|reduce-scatter|all-to-all)(?:-start)?\((.*)", text):
        sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", shapes)]
        size = sum(sizes) if kind == "all-to-all" else max(sizes)  # it may be cut into parts
        found.append((kind, size, f"replica_groups={groups}" in rest))
    return found


@pytest.fixture(scope="module")
def updates(request) -> dict:
    cases = {item.callspec.params["case"] for item in request.session.items if item.module.__name__ == __name__}
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    command, env = [sys.executable, "-m", __name__, *cases], os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", [*DAILY, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)])
def test_an_update_is_that_of_one_device(updates, case):
    """Output or loss, statistics, losses of the router and every gradient."""
    assert max(updates[case]["errors"].values()) < TOLERANCE["float64"]
    assert ("capacity" in case) == (updates[case]["drops"] > 0)


@pytest.mark.parametrize("case", [*DAILY, *(pytest.param(c, marks=pytest.mark.long) for c in LONG if "expert" in c)])
def test_tokens_go_to_experts_and_experts_stay_where_they_are(updates, case):
    """A device sees no more than its own experts' kernels, and all-to-alls of at least its tokens, there and back."""
    mesh = dict(axis.split("=") for axis in case.split()[2:])
    tokens, own = 16 * 32, 8 // int(mesh["expert"]) * 32 * 32 // int(mesh.get("tensor", 1))
    moves = updates[case]["moves"]
    assert max((size for kind, size, _ in moves if kind == "all-gather"), default=0) <= own
    of_tokens = [along_expert for kind, size, along_expert in moves if kind == "all-to-all" and size >= tokens]
    assert all(of_tokens) and len(of_tokens) >= 4  # forward, and backward


@pytest.mark.long
@pytest.mark.parametrize("case", ["llama dense fsdp=8"])
def test_with_parameters_cut_alone_no_token_goes_anywhere(updates, case):
    kinds = {kind for kind, _, _ in updates[case]["moves"]}
    assert "all-gather" in kinds and "all-to-all" not in kinds


if __name__ == "__main__":
    with jax.enable_x64(True):
        print(json.dumps({case: run(case) for case in sys.argv[1:]}))
