"""Contract 8: the gradient of the training loss equals finite differences in float64, for every parameter.

Other tests compare two implementations that share code: a `stop_gradient` in that code changes both. Finite differences
only evaluate the loss.

Along a direction d, (loss(p + h d) - loss(p - h d)) / 2h is the slope up to T h^2 / 6 + e / h, where T is the third
derivative along d and e the rounding error of the loss (1e-16 to 1e-15 here, measured). The sum is smallest near
h = (3 e / T)^(1/3): 1e-6 to 1e-5 for T from 1 to 1000. At STEP the error is below 2e-8 for slopes of at least 0.1. So
small a step rarely crosses the kink of a ReLU or changes a choice of experts.
"""

import re

import jax
import numpy as np
import pytest

from tests.contracts import losses
from tests.contracts.two_stacks import MODELS, SOURCE
from tests.contracts.variants import (
    ALL,
    BATCH,
    DISTINCT,
    LENGTH,
    VARIANTS,
    in_float64,
    marked,
    model,
    random_params,
)
from tests.daily import daily
from xfresearch.kernels import chunked_attention, grouped_matmul
from xfresearch.runtime.trees import by_path, path_name

STEP, TOLERANCE = 3e-6, 1e-7
# Two documents and padding, then one document.
SEGMENTS_BL = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8], np.int32)
POSITIONS_BL = np.array([[0, 1, 2, 0, 1, 2, 3, 0], range(8)], np.int32)
# Only the choice of experts reads it; `after_update` changes it.
WITHOUT_GRADIENT = r"blocks/\w+/feed_forward/router_bias"


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    losses.compile_loops_once(monkeypatch)


def loss_of(config, key=None, **training):
    """The loss with weighted tokens and a z-loss; the head computes logits for 5 tokens at a time."""
    random = np.random.default_rng(7)
    tokens_BL = random.integers(0, config.vocab_size, (BATCH, LENGTH + 1)).astype(np.int32)
    weights_BL = random.uniform(0.5, 1.5, SEGMENTS_BL.shape) * (SEGMENTS_BL > 0)
    batch = losses.batch_of(tokens_BL, SEGMENTS_BL, POSITIONS_BL, weights_BL) | source_of(config)
    return losses.loss_of(config, batch, key, packing="documents", **{"z_loss": 0.01, "loss_rows": 5, **training})


def source_of(config) -> dict:
    """The part of a batch that an encoder reads: the sources of the two documents, or of one; {} without an encoder."""
    if config.encoder is None:
        return {}
    source_BS = np.random.default_rng(8).integers(0, config.vocab_size, (BATCH, SOURCE)).astype(np.int32)
    segments_BS = np.array([[1] * (SOURCE - 3) + [2, 2, 0], [1] * SOURCE], np.int32)
    positions_BS = np.array([[*range(SOURCE - 3), 0, 1, 0], range(SOURCE)], np.int32)
    return {"source": source_BS, "source_segments": segments_BS, "source_positions": positions_BS}


def directions(gradients):
    """A random unit vector for each parameter. Its sign makes the slope positive, so that slopes do not cancel."""
    random = np.random.default_rng(1)

    def draw(gradient):
        direction = random.standard_normal(gradient.shape)
        sign = 1 if (direction * gradient).sum() >= 0 else -1
        return sign * direction / np.linalg.norm(direction)

    return jax.tree.map(draw, gradients)


def slope(value_and_gradients, params, direction) -> float:
    def at(distance):
        return value_and_gradients(jax.tree.map(lambda p, d: p + distance * d, params, direction))[0]

    return float(at(STEP) - at(-STEP)) / (2 * STEP)


def check(loss, params, each: bool = False, jit=lambda function: function):
    """Compares slopes along one direction of all parameters. If that fails, or with `each`, parameter by parameter."""
    value_and_gradients = jit(jax.value_and_grad(loss))  # also for values alone: one program to compile instead of two
    gradients = value_and_gradients(params)[1]
    for name, gradient in by_path(gradients).items():
        assert not re.fullmatch(WITHOUT_GRADIENT, name) or not gradient.any(), f"{name} has a gradient"
    direction = directions(gradients)
    slopes = {
        name: float(s) for name, s in by_path(jax.tree.map(lambda g, d: (g * d).sum(), gradients, direction)).items()
    }
    whole = sum(slopes.values())
    result = slope(value_and_gradients, params, direction)
    right = abs(result - whole) < TOLERANCE * whole
    if each or not right:
        alone = {name: slope(value_and_gradients, params, only(direction, name)) for name in slopes}
        wrong = {name: (s, alone[name]) for name, s in slopes.items() if abs(alone[name] - s) > TOLERANCE * whole}
        assert not wrong, f"(slope by the gradient, by finite differences): {wrong}"
    assert right, f"slope {whole} by the gradient, {result} by finite differences"


def only(direction, name: str):
    return jax.tree_util.tree_map_with_path(lambda path, d: d if path_name(path) == name else 0 * d, direction)


# Named configs have different sizes, so JAX would compile all of their operations again. Patterns consist of blocks that
# other variants have. Layouts call the same sublayers, and identities stand in for projections: some are enough. Rotations,
# ALiBi and the norm of queries and keys have no rule for derivatives of their own.
ALIKE = (
    *("configs/", "pattern", "segments", "norm_bias", "attention.bias", "feed_forward.bias", "attention[slots]"),
    *("layout=", "attention.query=identity", "attention.key=identity", "attention.value=identity", "feed_forward[moe]"),
    *("attention.qk_norm_over", "attention.output_gate=head", "attention.shaping=shaped", "feed_forward.kind=glu"),
    *("norm=derf", "attention.qk_norm=", "attention.position=rope", "attention.position=alibi", "attention.kv_heads"),
)
DEFAULT_RUN = ["layout=skipless", "layout=all_attention", "feed_forward[moe].moe.balance=bias"]
DEFAULT_RUN += [name for name in DISTINCT if not name.startswith(ALIKE)]


@pytest.mark.parametrize("name", marked(DEFAULT_RUN))
def test_gradient_equals_finite_differences(name, x64):
    config = in_float64(ALL[name])
    check(loss_of(config), random_params(config))


@pytest.mark.parametrize("name", daily(["merged"], MODELS))
def test_gradient_through_two_stacks_equals_finite_differences(name, x64):
    config = in_float64(MODELS[name])
    check(loss_of(config), random_params(config))


@pytest.mark.long
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_gradient_of_rematerialised_stacks(layers, x64):
    config = in_float64(MODELS["in-turns"])
    check(loss_of(config, layers=layers, remat="full"), random_params(config), jit=jax.jit)


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_gradient_of_each_parameter_equals_finite_differences(name, x64):
    config = in_float64(ALL[name])
    check(loss_of(config), random_params(config), each=True)


NOISY = {
    "dropout": {"dropout": 0.3, "blocks.main.dropout": 0.3, "blocks.main.attention.dropout": 0.3,
                "blocks.main.attention.memory_slots": 32},
    "jitter": {"blocks.main.feed_forward.kind": "moe", "blocks.main.feed_forward.moe.jitter": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("name", NOISY)
def test_gradient_with_noise_equals_finite_differences_with_the_same_key(name, x64):
    config = in_float64(model(NOISY[name]))
    check(loss_of(config, jax.random.key(5)), random_params(config))


def test_gradient_with_expert_choice(x64):
    moe = {"routing": "expert_choice", "capacity": 1.0, "renormalise": False, "balance": "none"}
    changes = {f"blocks.main.feed_forward.moe.{name}": value for name, value in moe.items()}
    config = in_float64(model({"causal": False, "blocks.main.feed_forward.kind": "moe", **changes}))
    check(loss_of(config), random_params(config))


SLOTS = {"depth": 1, "blocks.main.attention.memory_slots": 32, "blocks.main.attention.kv_heads": 2}
CAPPED = {"blocks.main.attention.softcap": 2.0, "logit_softcap": 2.0, "head_bias": True}
FAST = {
    "blocked": (model(SLOTS), "blocked", "auto"),
    "chunked": (model({**SLOTS, **CAPPED}), "chunked", "auto"),
    "experts": (model({"depth": 1, "blocks.main.feed_forward.kind": "moe"}), "plain", "blocked"),
}


@pytest.mark.parametrize("name", FAST)
def test_gradient_of_kernels_that_define_their_backward_pass(name, x64, monkeypatch):
    """The blocks are so small that there are several."""
    monkeypatch.setitem(grouped_matmul.BLOCKS, "cpu", 3)
    monkeypatch.setattr(chunked_attention, "CHUNK", 3)
    config, attention, experts = FAST[name]
    config = in_float64(config)
    loss = loss_of(config, attention_kernel=attention, expert_kernel=experts)
    check(loss, random_params(config), jit=jax.jit)


@pytest.mark.long
def test_gradient_of_scanned_and_rematerialised_layers(x64):
    config = in_float64(VARIANTS["pattern-repeated"])
    check(loss_of(config, layers="scan", remat="full"), random_params(config), jit=jax.jit)
