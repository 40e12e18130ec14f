"""Mixture of experts: router statistics, capacity, jitter, and the coefficients of each expert.

tests/contracts/test_reference.py compares outputs and losses of every option with NumPy.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import VARIANTS, in_float64, model, random_params, tokens_for
from tests.reference import model as reference
from tests.reference.norms import softmax
from tests.tolerances import TOLERANCE, relative_error
from tests.variants.moe import scores
from xfresearch.models import inputs, layers, transformer
from xfresearch.models.context import Context
from xfresearch.models.model_config import longest_sequence
from xfresearch.models.taps import Patch, Taps
from xfresearch.runtime.errors import UserError

OPTIONS = [
    {},
    {"scores": "sigmoid", "balance": "bias"},
    {"capacity": 0.125},
    {"capacity": 0.125, "balance": "bias", "top_k": 3, "shared": 1},
    {"top_k": 8, "renormalise": False},
]
SEGMENTS_BL = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [0, 0, 1, 1, 1, 1, 1, 1]], np.int32)


def sparse(depth=1, **options):
    prefix = "blocks.main.feed_forward."
    options = {f"{prefix}moe.{name}": value for name, value in options.items()}
    return in_float64(model({"depth": depth, f"{prefix}kind": "moe", **options}))


def layer(config):
    """The first layer's mixture, its parameters in NumPy, and inputs [2, 8, D]."""
    params = random_params(config)
    first = layers.unstack(transformer.bind(config, params).blocks["main"], config.depth)[0].feed_forward
    x_BLD = np.random.default_rng(1).standard_normal((2, 8, config.width))
    return first, reference.pick(params["blocks"]["main"], 0)["feed_forward"], x_BLD


def context(**options):
    return Context(positions_BL=None, **options)


def expected_statistics(p, x_LD, config, real):
    """The router statistics from their definitions, token by token."""
    moe = config.blocks["main"].feed_forward.moe
    z_LE = x_LD @ p["router"]["kernel"]
    s_LE = scores(moe, z_LE)
    E = moe.experts
    k = moe.top_k
    by_LE = s_LE + p.get("router_bias", 0)
    C = math.ceil(moe.capacity * k * config.max_length / E)
    load_E = np.zeros(E, int)
    mass_E = np.zeros(E)
    entropy = 0.0
    margin = 0.0
    drops = 0
    for t in np.flatnonzero(real):
        order = np.argsort(-by_LE[t])
        P_E = s_LE[t] / s_LE[t].sum()
        margin += by_LE[t, order[k - 1]] - by_LE[t, order[k]] if k < E else 0
        mass_E += P_E
        entropy -= (P_E * np.log(P_E)).sum()
        for e in order[:k]:
            drops += bool(C) and load_E[e] >= C
            load_E[e] += 1
    names = ("load", "mass", "entropy", "margin", "drops")
    return {f"router_{n}": v for n, v in zip(names, (load_E, mass_E, entropy, margin, drops), strict=True)}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_statistics_are_sums_over_tokens_without_padding(options, x64):
    config = sparse(**options)
    mixture, p, x_BLD = layer(config)
    statistics = mixture(jnp.asarray(x_BLD), context(segments_BL=SEGMENTS_BL))[2].statistics
    for b in range(2):
        expected = expected_statistics(p, x_BLD[b], config, SEGMENTS_BL[b] > 0)
        assert statistics.keys() == expected.keys()
        for name, value in expected.items():
            assert relative_error(statistics[name][b], value) < TOLERANCE["float64"], name
    if "capacity" in options:
        assert statistics["router_drops"].all()


@pytest.mark.parametrize("remat", ["none", "full"])
def test_statistics_are_equal_when_scanned_and_unrolled(remat):
    config = VARIANTS["pattern"]
    params = random_params(config)
    tokens_BL = tokens_for(config)
    lm = transformer.bind(config, params)
    ctx = Context(np.broadcast_to(np.arange(8), (2, 8)))
    scanned, unrolled = (
        jax.jit(lambda tokens_BL, m=m: lm(tokens_BL, ctx, layers=m, remat=remat).statistics)(tokens_BL)
        for m in ("scan", "unroll")
    )
    assert scanned["dense"] == unrolled["dense"] == {}
    scanned, unrolled = (each["sparse"]["feed_forward"] for each in (scanned, unrolled))
    assert {name: x.shape for name, x in scanned.items()} == {
        **dict.fromkeys(("router_load", "router_mass"), (2, 2, 8)),
        **dict.fromkeys(("router_entropy", "router_margin", "router_drops"), (2, 2)),
    }
    for name, value in scanned.items():
        assert relative_error(unrolled[name], value) < TOLERANCE["float32"], name
    np.testing.assert_array_equal(scanned["router_load"].sum(-1), 8 * 2)


def test_statistics_have_no_gradient(x64):
    mixture, _, x_BLD = layer(sparse(scores="sigmoid", balance="bias"))

    def total(x_BLD):
        return sum(value.sum() for value in mixture(x_BLD, context())[2].statistics.values())

    assert not jax.grad(total)(jnp.asarray(x_BLD)).any()


def test_a_later_token_never_takes_the_slot_of_an_earlier_one(x64):
    """A gradient does not show it, because slots are integers."""
    config = sparse(depth=2, capacity=0.125)
    params = random_params(config)
    tokens_BL = tokens_for(config)
    run = jax.jit(lambda tokens_BL: forward(config, params, tokens_BL)[0])
    logits = run(tokens_BL)
    other_BL = np.random.default_rng(1).integers(0, 64, tokens_BL.shape).astype(np.int32)
    for t in range(1, 8):
        changed = run(np.concatenate([tokens_BL[:, :t], other_BL[:, t:]], 1))
        np.testing.assert_array_equal(changed[:, :t], logits[:, :t])


def test_sequences_are_not_longer_than_those_whose_capacity_the_experts_have():
    limited = sparse(capacity=0.125)
    assert longest_sequence(limited) == limited.max_length > 0 and longest_sequence(sparse()) == 0
    tokens_BL = np.zeros((1, limited.max_length + 1), np.int32)
    with pytest.raises(UserError, match="the length must be at most .*, by the .* capacity of its experts"):
        inputs.as_tokens(limited, None, tokens_BL)


def test_padding_takes_no_slot(x64):
    """Padding does not change the outputs of the tokens after it."""
    mixture, _, x_BLD = layer(sparse(capacity=0.125))
    x_BLD = jnp.asarray(x_BLD)
    padded, alone = mixture(x_BLD, context(segments_BL=SEGMENTS_BL)), mixture(x_BLD[1:, 2:], context())
    assert relative_error(padded[0][1, 2:], alone[0][0]) < TOLERANCE["float64"]
    assert padded[2].statistics["router_drops"][1] == alone[2].statistics["router_drops"][0] > 0


def test_gates_are_not_renormalised_after_drops(x64):
    mixture, p, x_BLD = layer(sparse(capacity=0.125))
    taps = Taps(record=["gates"])
    mixture(jnp.asarray(x_BLD), context(taps=taps))
    gates_BLk = np.asarray(taps.values["gates"])
    top_BLk = np.sort(x_BLD @ p["router"]["kernel"], -1)[..., :-3:-1]
    assert relative_error(gates_BLk, np.where(gates_BLk > 0, softmax(top_BLk), 0)) < TOLERANCE["float64"]
    assert {0, 1, 2} == set((gates_BLk > 0).sum(-1).ravel().tolist())


def test_shared_experts_are_one_expert_of_their_total_size(x64):
    shared = transformer.abstract(sparse(shared=3))["blocks"]["main"]["feed_forward"]["shared"]
    assert {name: part["kernel"].shape for name, part in shared.items()} == {
        **dict.fromkeys(("up", "gate"), (1, 32, 3 * 32)),
        "down": (1, 3 * 32, 32),
    }


def test_the_router_bias_changes_the_choice_and_not_the_gates(x64):
    mixture, p, x_BLD = layer(sparse(scores="sigmoid", balance="bias", top_k=1, renormalise=False))
    mixture.router_bias[...] = jnp.zeros(8).at[5].set(2.0)
    taps = Taps(record=["gates"])
    statistics = mixture(jnp.asarray(x_BLD), context(taps=taps))[2].statistics
    np.testing.assert_array_equal(statistics["router_load"], np.tile(8 * np.eye(8, dtype=int)[5], (2, 1)))
    expected_BL = 1 / (1 + np.exp(-(x_BLD @ p["router"]["kernel"])[..., 5]))
    assert relative_error(taps.values["gates"][..., 0], expected_BL) < TOLERANCE["float64"]


def test_saturated_scores_keep_their_order():
    mixture, _, x_BLD = layer(model({"depth": 1, "blocks.main.feed_forward.kind": "moe"}))
    log_BLE = jax.nn.log_sigmoid(jnp.arange(20.0, 28.0))[None, None]  # every sigmoid is 1 in float32
    np.testing.assert_array_equal(mixture._highest(log_BLE)[0][0, 0], [7, 6])


def test_jitter_is_uniform_around_one_and_off_without_a_key():
    mixture, _, _ = layer(model({"depth": 1, "blocks.main.feed_forward.kind": "moe"} | jitter(0.3)))
    ones_BLD = jnp.ones((8, 128, 32), jnp.bfloat16)
    noise = np.asarray(mixture._router_input(ones_BLD, context(key=jax.random.key(0))))
    assert 0.7 <= noise.min() < 0.701 and 1.299 < noise.max() <= 1.3
    assert noise.mean() == pytest.approx(1, abs=3e-3) and noise.std() == pytest.approx(0.3 / math.sqrt(3), rel=0.02)
    assert (mixture._router_input(ones_BLD, context()) == 1).all()


def jitter(value):
    return {"blocks.main.feed_forward.moe.jitter": value}


@pytest.mark.covers("blocks.main.feed_forward[moe].moe.jitter")
def test_jitter_depends_on_the_key_changes_only_the_router_and_is_equal_when_scanned(x64):
    config = sparse(depth=2)
    noisy = model(jitter(0.5), config)
    params = random_params(config)
    tokens_BL = tokens_for(config)
    keys = (jax.random.key(0), jax.random.key(1), None)
    first, other, off = (forward(noisy, params, tokens_BL, key=key)[0] for key in keys)
    assert not np.allclose(first, other) and not np.allclose(first, off)
    np.testing.assert_array_equal(off, forward(config, params, tokens_BL)[0])
    assert relative_error(forward(noisy, params, tokens_BL, "scan", key=keys[0])[0], first) < TOLERANCE["float64"]
    experts = params["blocks"]["main"]["feed_forward"]["experts"]
    experts |= {name: jnp.broadcast_to(w[:, :1], w.shape) for name, w in experts.items()}  # all experts are equal
    same, off = (forward(noisy, params, tokens_BL, key=key)[0] for key in (keys[0], None))
    assert relative_error(same, off) < TOLERANCE["float64"]


@pytest.mark.parametrize("options", [{}, {"expert": "relu", "capacity": 0.25, "top_k": 3}], ids=str)
def test_coefficients_have_a_row_for_each_token_and_choice(options, x64):
    """[B, L, k, F]: the factors of the rows of each chosen expert's down matrix."""
    mixture, p, x_BLD = layer(sparse(**options))
    x_BLD = jnp.asarray(x_BLD)
    taps = Taps(record=["coefficients", "gates"])
    y_BLD = mixture(x_BLD, context(taps=taps))[0]
    np.testing.assert_array_equal(y_BLD, mixture(x_BLD, context())[0])
    h_BLkF, gates_BLk = (np.asarray(taps.values[name]) for name in ("coefficients", "gates"))
    expert_BLk = np.argsort(-(x_BLD @ p["router"]["kernel"]))[..., : h_BLkF.shape[2]]
    np_y = np.einsum("blk,blkf,blkfd->bld", gates_BLk, h_BLkF, p["experts"]["down"][expert_BLk])
    assert relative_error(y_BLD, np_y) < TOLERANCE["float64"]

    def replaced(function):
        return mixture(x_BLD, context(taps=Taps(patches={"coefficients": [Patch(function)]})))[0]

    np.testing.assert_array_equal(replaced(lambda h: h), y_BLD)
    without = replaced(lambda h: h.at[1, 3].set(0))
    assert (without[1, 3] == 0).all()
    np.testing.assert_array_equal(without.at[1, 3].set(y_BLD[1, 3]), y_BLD)


def test_only_the_routers_product_has_full_precision():
    """On TPUs and GPUs, a float32 product with the default precision rounds its factors."""
    config = model({"blocks.main.feed_forward.kind": "moe", "dtype": "bfloat16", "depth": 1})
    tokens_BL, E = tokens_for(config), config.blocks["main"].feed_forward.moe.experts
    text = jax.jit(lambda params: forward(config, params, tokens_BL)[0]).lower(random_params(config)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    (of_router,) = (line for line in products if "HIGHEST" in line)
    assert of_router.endswith(f"-> tensor<{tokens_BL.size}x{E}xf32>") and len(products) > 4
