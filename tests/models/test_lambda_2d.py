"""The published lambda layer over a plane, against its equation in NumPy and its closed-form costs."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models import reference
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.errors import UserError
from xfresearch.models.counting import count_flops
from xfresearch.models.lambda_2d import Lambda2d, Lambda2dConfig

B, Y, X = 2, 3, 4
BASE = Lambda2dConfig(width=12, heads=2, key_size=5, depth=2, window=3, dtype="float64", param_dtype="float64")
GLOBAL = replace(BASE, window=0, size=(Y, X))
CONFIGS = {
    "local": replace(BASE, norm="none"),
    "global": replace(GLOBAL, norm="none"),
    "depth 1": replace(BASE, depth=1, norm="none"),
    "window past the plane": replace(BASE, window=9, norm="none"),
    "one pixel": replace(BASE, window=1, norm="none"),
    "batch": BASE,
    "layer": replace(GLOBAL, norm="layer"),
    "rms": replace(BASE, norm="rms"),
}


def normed(kind, params, x):
    """A norm of [B, Y, X, groups, size]; batch norm over the first three axes (Ioffe & Szegedy 2015, alg. 1)."""
    if kind == "batch":
        flat = x.reshape(*x.shape[:3], -1)
        flat = (flat - flat.mean((0, 1, 2))) / np.sqrt(flat.var((0, 1, 2)) + 1e-5)
        return (flat * params["scale"] + params["bias"]).reshape(x.shape)
    return reference.NORMS[kind](params, x, 1e-5)


def expected(config, p, x_BYXD):
    """Position by position, head by head, from the equation."""
    q, k, v = (np.tensordot(x_BYXD, p[name]["kernel"], 1) for name in ("query", "key", "value"))
    q, v = (normed(config.norm, p.get(f"{n}_norm", {}).get("norm", {}), a) for n, a in (("query", q), ("value", v)))
    e, places, y_BYXD = p["distances"], list(itertools.product(range(Y), range(X))), np.zeros_like(x_BYXD)
    middle = np.array(e.shape[:2]) // 2
    for b in range(B):
        weights = np.exp(k[b]) / np.exp(k[b]).sum((0, 1))
        for n in places:
            total = 0
            for m, u in itertools.product(places, range(config.depth)):
                total += np.outer(weights[m][u], v[b][m][u])
                row = tuple(np.array(m) - n + middle)
                if all(0 <= i < size for i, size in zip(row, e.shape, strict=False)):
                    total += np.outer(e[row][u], v[b][m][u])
            y_BYXD[b][n] = np.concatenate([total.T @ q[b][n][h] for h in range(config.heads)])
    return y_BYXD


def layer_with_random_params(config):
    """The layer with nothing left at zero or one, and its parameters as a nested dict."""
    random, layer = np.random.default_rng(0), Lambda2d(config, nnx.Rngs(0))
    params = nnx.state(layer, nnx.Param)
    params = jax.tree.map(lambda leaf: jax.numpy.asarray(random.standard_normal(leaf.shape), leaf.dtype), params)
    nnx.update(layer, params)
    return layer, jax.tree.map(np.asarray, nnx.to_pure_dict(params))


@pytest.mark.parametrize("name", CONFIGS)
def test_is_the_equation(name, x64):
    layer, params = layer_with_random_params(CONFIGS[name])
    x_BYXD = np.random.default_rng(1).standard_normal((B, Y, X, 12))
    assert relative_error(layer(x_BYXD), expected(CONFIGS[name], params, x_BYXD)) < TOLERANCE["float64"]


@pytest.mark.parametrize("name", CONFIGS)
def test_costs_are_counted_ones(name, x64):
    config, x_BYXD = CONFIGS[name], jax.ShapeDtypeStruct((B, Y, X, 12), "float64")
    layer = Lambda2d(config, nnx.Rngs(0))
    costs = Lambda2d.costs(config, (Y, X))
    assert costs.parameters == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    graph, state = nnx.split(layer)
    counted = count_flops(lambda state, x_BYXD: nnx.merge(graph, state)(x_BYXD), state, x_BYXD)
    assert counted == B * Y * X * costs.flops_per_token


def test_batch_norm_evaluates_with_running_statistics(x64):
    """An image then yields the same alone and in company."""
    layer, _ = layer_with_random_params(BASE)
    x_BYXD = np.random.default_rng(1).standard_normal((B, Y, X, 12))
    layer(x_BYXD)
    layer.eval()
    assert relative_error(layer(x_BYXD[:1]), layer(x_BYXD)[:1]) < TOLERANCE["float64"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"heads": 5}, ["heads=5", "width=12"]),
        ({"window": 4}, ["window=4", "odd"]),
        ({"window": 0}, ["size=(0, 0)", "at least (1, 1)"]),
        ({"size": (3, 4)}, ["size=(3, 4)", "window=3"]),
    ],
)
def test_impossible_combinations(changes, words):
    with pytest.raises(UserError) as error:
        Lambda2d(replace(BASE, **changes), nnx.Rngs(0))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_plane_of_another_size_than_the_global_table_is_refused(x64):
    with pytest.raises(UserError, match=r"size=\(3, 4\).*\(4, 4\)"):
        Lambda2d(GLOBAL, nnx.Rngs(0))(np.zeros((1, 4, 4, 12)))
