"""Experts on 8 simulated devices: a layer and its gradients equal those on one device; what is sent between devices.

For whole updates on meshes see tests/training/test_meshes.py.
"""

import json
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from tests.blocks import block
from tests.contracts.variants import in_float64, random_params, tree_error
from tests.contracts.variants import model as resolved
from tests.simulated import results_on_devices
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models import layers, transformer
from xfresearch.models.context import Context
from xfresearch.models.model_config import ModelConfig
from xfresearch.models.taps import Patch, Taps
from xfresearch.planning import hlo
from xfresearch.planning.collectives import collectives
from xfresearch.runtime.errors import UserError
from xfresearch.sharding.mesh import AXES
from xfresearch.sharding.partition import batch_sharding, param_shardings

B, L, E, D, F = 8, 16, 8, 32, 32
FLOAT64 = 8  # bytes
LENGTHS = [16, 7, 1, 16, 11, 5, 14, 9]  # tokens of each sequence before its padding
MOE = "blocks.main.feed_forward.moe."
CAPACITY = {MOE + "capacity": 0.75}
BIAS = {MOE + "balance": "bias", MOE + "scores": "sigmoid", MOE + "shared": 1}
EXPERT_CHOICE = {
    MOE + "routing": "expert_choice", MOE + "capacity": 1.0, MOE + "renormalise": False, MOE + "balance": "none",
    "causal": False,
}  # fmt: skip
BIASES = {MOE + "bias": ("router", "experts")}
KINDS = {
    "dropless": BIASES, "bias": BIAS, "one-sided": BIAS, "capacity": CAPACITY, "capacity-bias": CAPACITY | BIAS | BIASES,
    "expert-choice": EXPERT_CHOICE | BIASES,
}  # fmt: skip
DEFAULT_RUN = ["dropless expert=2 fsdp=2 tensor=2", "capacity-bias expert=2 fsdp=2 context=2"]
LONG = [
    "one-sided expert=8",
    "dropless expert=4 context=2",
    "dropless data=2 expert=2 fsdp=2",
    "dropless fsdp=4 tensor=2",
    "bias expert=4 tensor=2",
    "bias expert=2 tensor=2 context=2",
    "one-sided expert=4 fsdp=2",
    "capacity expert=8",
    "capacity expert=2 fsdp=2 tensor=2",
    "capacity fsdp=2 context=4",
    "capacity-bias expert=4 context=2",
    "expert-choice expert=2 fsdp=2 context=2",
    "expert-choice expert=4 tensor=2",
]
MARKED = [*DEFAULT_RUN, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)]


def run(case: str) -> dict:
    """Relative errors of a layer's output, statistics and gradients; dropped choices; collectives of the program."""
    kind = case.split()[0]
    sizes = mesh_sizes(case)
    mesh = jax.make_mesh([sizes.get(axis, 1) for axis in AXES], AXES, axis_types=(AxisType.Auto,) * 5)
    moe = block(feed_forward={"kind": "moe", "hidden": F, "moe": {"experts": E}})
    config = ModelConfig(width=D, depth=1, vocab_size=64, max_length=L, blocks={"main": moe})
    balanced = KINDS[kind].get(MOE + "balance", "loss") == "loss"
    losses = {MOE + "z_loss": 0.1} | ({MOE + "balance_loss": 0.1} if balanced else {})
    config = in_float64(resolved({**losses, **KINDS[kind]}, config))
    params = random_params(config)
    if kind == "one-sided":  # all tokens choose the first two experts
        params["blocks"]["main"]["feed_forward"]["router_bias"] += 100.0 * (np.arange(E) < 2)
    x_BLD, dy_BLD = np.random.default_rng(0).standard_normal((2, B, L, D))
    segments_BL = (np.arange(L) < np.array(LENGTHS)[:, None]).astype(np.int32)

    def loss(params, x_BLD, mesh):
        layer = layers.unstack(transformer.bind(config, params).blocks["main"], 1)[0].feed_forward
        y_BLD, _, aux = layer(x_BLD, Context(None, segments_BL, mesh=mesh))
        return (y_BLD * dy_BLD).sum() + sum(x.sum() for x in aux.losses.values()), (y_BLD, aux.statistics)

    def tapped(params, x_BLD, mesh):
        """The output with half of the hidden units, and values of taps."""
        layer = layers.unstack(transformer.bind(config, params).blocks["main"], 1)[0].feed_forward
        half = {"hidden": [Patch(lambda h: h * (np.arange(F) % 2))]}
        taps = Taps(("chosen", "pre_activation", "coefficients"), half)
        return {"output": layer(x_BLD, Context(None, segments_BL, mesh=mesh, taps=taps))[0]} | taps.values

    both = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    expected, (expected_BLD, expected_sums) = both(params, x_BLD, None)
    shardings = param_shardings(mesh, params, transformer.axes(config))
    placed = jax.device_put(params, shardings), jax.device_put(x_BLD, batch_sharding(mesh))
    program = both.lower(*placed, mesh).compile()
    gradients, (y_BLD, sums) = program(*placed)
    errors = {name: relative_error(value, expected_sums[name]) for name, value in sums.items()}
    errors |= {"output": relative_error(y_BLD, expected_BLD)}
    errors |= {"gradients": tree_error(jax.device_get(gradients), expected)}
    actual, expected = jax.jit(tapped, static_argnums=2)(*placed, mesh), tapped(params, x_BLD, None)
    errors |= {f"tapped {name}": relative_error(value, expected[name]) for name, value in actual.items()}
    drops = int(expected_sums.get("router_drops", np.zeros(1)).sum())
    return {"errors": errors, "drops": drops, "moves": moves(program.as_text(), mesh)}


def mesh_sizes(case: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (text.split("=") for text in case.split()[1:])}


def moves(text: str, mesh) -> list:
    """(kind, bytes, whether its groups are those of mesh axis `expert`) of each collective in a compiled program."""
    result = collectives(hlo.parse(text), dict(mesh.shape))
    return [(one.kind, one.payload, one.axes == ("expert",) and one.whole) for one in result]


pytestmark = pytest.mark.xdist_group("dispatch")  # one program computes all results: run it in one worker


@pytest.fixture(scope="module")
def results(request) -> dict:
    parameters = [
        item.callspec.params
        for item in request.session.items
        if item.module.__name__ == __name__ and hasattr(item, "callspec")
    ]
    return results_on_devices(8, "-m", __name__, *{p["case"] for p in parameters})


@pytest.mark.parametrize("case", MARKED)
def test_a_layer_on_a_mesh_equals_that_on_one_device(results, case):
    assert max(results[case]["errors"].values()) < TOLERANCE["float64"]
    assert ("capacity" in case) == (results[case]["drops"] > 0)


@pytest.mark.parametrize("case", MARKED)
def test_tokens_are_sent_to_experts_and_experts_are_not_sent(results, case):
    """No device gathers the kernels of other experts. Tokens are sent to their experts and back in both passes."""
    sizes = mesh_sizes(case)
    moves = results[case]["moves"]
    own = FLOAT64 * E // sizes.get("expert", 1) * D * F // sizes.get("tensor", 1)
    tokens = FLOAT64 * B * L * sizes.get("tensor", 1) // 8 * D
    assert max((size for kind, size, _ in moves if kind == "all-gather"), default=0) <= own
    of_tokens = [along_expert for kind, size, along_expert in moves if kind == "all-to-all" and size >= tokens]
    assert all(of_tokens) and len(of_tokens) >= (4 if "expert" in sizes else 0)


def test_hidden_units_of_a_softmax_cannot_be_sharded():
    softmax = block(feed_forward={"kind": "moe", "hidden": F, "moe": {"experts": E, "expert": "softmax"}})
    config = resolved({}, ModelConfig(width=D, depth=1, vocab_size=64, max_length=L, blocks={"main": softmax}))
    mesh = AbstractMesh((1, 1, 1, 2, 1), AXES, axis_types=(AxisType.Auto,) * 5)
    with pytest.raises(UserError, match=r"mesh\.tensor=2.* 1 with moe\.expert='softmax'"):
        jax.eval_shape(
            lambda params, tokens: transformer.bind(config, params)(tokens, Context(tokens, mesh=mesh)),
            transformer.abstract(config),
            jax.ShapeDtypeStruct((B, L), np.int32),
        )


if __name__ == "__main__":
    with jax.enable_x64(True):
        print(json.dumps({case: run(case) for case in sys.argv[1:]}))
