"""Contract 8: the gradient of the training loss is its slope, by finite differences in float64, for every parameter.

Other tests compare two implementations that share code: a `stop_gradient` in that code changes both. A finite difference
evaluates the loss and nothing else.

Along a direction d, (loss(p + h d) - loss(p - h d)) / 2h is the slope up to T h^2 / 6 + e / h, where T is the third
derivative along d and e the loss's rounding error (1e-16 to 1e-15 here, as measured). The sum is smallest near
h = (3 e / T)^(1/3): 1e-6 to 1e-5 for T from 1 to 1000. At STEP the error is then below 2e-8 of slopes of 0.1 and more.
Neither ReLUs nor choices of experts trouble so small a step, unless a random point lies within it of a kink.
"""

import re

import jax
import numpy as np
import pytest

from tests.contracts import losses
from tests.contracts.test_kernels import attention_kernels
from tests.contracts.variants import (
    ALL,
    BATCH,
    DISTINCT,
    LENGTH,
    VARIANTS,
    in_float64,
    marked,
    model,
    plain,
    random_params,
)
from xfresearch.kernels import chunked_attention, grouped_matmul
from xfresearch.models.axes import path_name
from xfresearch.models.kernel_choices import with_kernels

STEP, TOLERANCE = 3e-6, 1e-7
# Two documents and padding, then one document.
SEGMENTS_BL = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8], np.int32)
POSITIONS_BL = np.array([[0, 1, 2, 0, 1, 2, 3, 0], range(8)], np.int32)
# The choice of experts alone reads it, and training/routing.py moves it.
WITHOUT_GRADIENT = r"blocks/\w+/feed_forward/router_bias"


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    losses.compile_loops_once(monkeypatch)


def loss_of(config, key=None, **training):
    """Weighted tokens, with a z-loss, the head's logits in tiles of 5 tokens."""
    random = np.random.default_rng(7)
    tokens_BL = random.integers(0, config.vocab_size, (BATCH, LENGTH + 1)).astype(np.int32)
    weights_BL = random.uniform(0.5, 1.5, SEGMENTS_BL.shape) * (SEGMENTS_BL > 0)
    batch = losses.batch_of(tokens_BL, SEGMENTS_BL, POSITIONS_BL, weights_BL)
    return losses.loss_of(config, batch, key, packing="documents", **{"z_loss": 0.01, "loss_rows": 5, **training})


def named(tree) -> dict:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def directions(gradients):
    """A random unit vector for each parameter, turned so that the loss grows along it: the sum of slopes cancels none."""
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
    """Along one direction of all parameters; parameter by parameter where `each` asks for it or the whole is wrong."""
    value_and_gradients = jit(jax.value_and_grad(loss))  # of values alone, too: one program to compile instead of two
    gradients = value_and_gradients(params)[1]
    for name, gradient in named(gradients).items():
        assert not re.fullmatch(WITHOUT_GRADIENT, name) or not gradient.any(), f"{name} has a gradient"
    direction = directions(gradients)
    slopes = {
        name: float(s) for name, s in named(jax.tree.map(lambda g, d: (g * d).sum(), gradients, direction)).items()
    }
    whole = sum(slopes.values())
    found = slope(value_and_gradients, params, direction)
    right = abs(found - whole) < TOLERANCE * whole
    if each or not right:
        alone = {name: slope(value_and_gradients, params, only(direction, name)) for name in slopes}
        wrong = {name: (s, alone[name]) for name, s in slopes.items() if abs(alone[name] - s) > TOLERANCE * whole}
        assert not wrong, f"(slope by the gradient, by finite differences): {wrong}"
    assert right, f"slope {whole} by the gradient, {found} by finite differences"


def only(direction, name: str):
    return jax.tree_util.tree_map_with_path(lambda path, d: d if path_name(path) == name else 0 * d, direction)


# Named configs have sizes of their own, so JAX compiles each of their operations anew; patterns are of blocks that are here.
EVERY_DAY = [name for name in DISTINCT if not name.startswith(("configs/", "pattern"))]


@pytest.mark.parametrize("name", marked(EVERY_DAY))
def test_gradient_is_the_slope_of_the_loss(name, x64):
    config = in_float64(plain(ALL[name]))
    check(loss_of(config), random_params(config))


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_gradient_of_each_parameter_is_the_slope_of_the_loss(name, x64):
    config = in_float64(plain(ALL[name]))
    check(loss_of(config), random_params(config), each=True)


NOISY = {
    "dropout": {"dropout": 0.3, "blocks.main.dropout": 0.3, "blocks.main.attention.dropout": 0.3,
                "blocks.main.attention.memory_slots": 32},
    "jitter": {"blocks.main.feed_forward.kind": "moe", "blocks.main.feed_forward.moe.jitter": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("name", NOISY)
def test_gradient_with_noise_is_the_slope_for_the_same_key(name, x64):
    config = in_float64(plain(model(NOISY[name])))
    check(loss_of(config, jax.random.key(5)), random_params(config))


def test_gradient_where_experts_choose_tokens(x64):
    moe = {"routing": "expert_choice", "capacity": 1.0, "renormalise": False, "balance": "none"}
    changes = {f"blocks.main.feed_forward.moe.{name}": value for name, value in moe.items()}
    config = in_float64(plain(model({"causal": False, "blocks.main.feed_forward.kind": "moe", **changes})))
    check(loss_of(config), random_params(config))


SLOTS = {"depth": 1, "blocks.main.attention.memory_slots": 32, "blocks.main.attention.kv_heads": 2}
CAPPED = {"blocks.main.attention.softcap": 2.0, "logit_softcap": 2.0, "head_bias": True}
FAST = {
    "blocked": (model(SLOTS), "blocked", "auto"),
    "chunked": (model({**SLOTS, **CAPPED}), "chunked", "auto"),
    "experts": (model({"depth": 1, "blocks.main.feed_forward.kind": "moe"}), "plain", "blocked"),
}


@pytest.mark.parametrize("name", FAST)
def test_gradient_of_kernels_with_a_backward_pass_of_their_own(name, x64, monkeypatch):
    """In blocks small enough that there are several."""
    monkeypatch.setitem(grouped_matmul.BLOCKS, "cpu", 3)
    monkeypatch.setattr(chunked_attention, "CHUNK", 3)
    config, attention, experts = FAST[name]
    config = attention_kernels(with_kernels(in_float64(config), "auto", experts), attention)
    check(loss_of(config), random_params(config), jit=jax.jit)


@pytest.mark.long
def test_gradient_of_scanned_layers_computed_anew(x64):
    config = in_float64(plain(VARIANTS["pattern-repeated"]))
    check(loss_of(config, layers="scan", remat="full"), random_params(config), jit=jax.jit)
