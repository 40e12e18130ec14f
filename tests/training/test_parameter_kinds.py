"""Weight decay and Muon apply to matrices of linear maps and to nothing else, by a table written by hand.

As in GPT-2 and Llama, norms, gains, biases, embeddings and positions do not decay. Experts are matrices, and so are
slots of attention: keys and values of a layer that reads them by a softmax (Sukhbaatar et al. 2019, sec. 3). Muon's
authors use Adam for embeddings, the head and all vectors (Jordan et al. 2024).
"""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import ALL
from tests.training.rules import rule_of
from xfresearch.models import transformer
from xfresearch.options.run_options import OptimizerConfig
from xfresearch.runtime.trees import by_path

# {path: the role of each dimension, for each rank}: b batch (one matrix per index), i inputs, o outputs. The first b
# are stacked layers.
MATRICES = {
    "block/attention/query/kernel": "bioo",
    "block/attention/key/kernel": "bioo",
    "block/attention/value/kernel": "bioo",
    "block/attention/output/kernel": "biio",
    "block/attention/gate/kernel": "bioo bio",
    "block/attention/lambda_key/kernel": "bioo",
    "block/attention/lambda_value/kernel": "bioo",
    "block/attention/memory/key": "bibo boi",  # one matrix of slots per head; one of the width, like W_up transposed
    "block/attention/memory/value": "bibo bio",
    "block/feed_forward/up/kernel": "bio",
    "block/feed_forward/gate/kernel": "bio",
    "block/feed_forward/down/kernel": "bio",
    "block/feed_forward/shared/up/kernel": "bio",
    "block/feed_forward/shared/gate/kernel": "bio",
    "block/feed_forward/shared/down/kernel": "bio",
    "block/feed_forward/router/kernel": "bio",
    "block/feed_forward/experts/up": "bbio",
    "block/feed_forward/experts/gate": "bbio",
    "block/feed_forward/experts/down": "bbio",
    "block/attention_mix_kernel": "bio",
    "block/feed_forward_mix_kernel": "bio",
    "head_layer/dense/kernel": "io",
}
NORMS = ["embedding_norm", "final_norm", "head_layer/norm", "block/feed_forward/hidden_norm"]
NORMS += [f"block/{s}_norm_{place}" for s in ("attention", "feed_forward") for place in ("in", "out", "post")]
NORMS += [f"block/attention/{part}" for part in ("query_norm", "key_norm", "head_norm", "query_scaling", "value_scaling")]
HYPER = ("read", "mix", "write", "read_kernel", "write_kernel", "read_scale", "write_scale")
OTHERS = {
    *(f"{norm}/{part}" for norm, part in itertools.product(NORMS, ("gain", "bias", "alpha", "shift"))),
    *("embed/table", "head/table", "head_bias/bias", "position/table", "embedding_scale"),
    *("token_type/table", "head_layer/dense/bias"),
    *("shared/relative_key", "shared/relative_bias", "block/attention/distances"),
    *(f"block/attention/{name}/bias" for name in ("query", "key", "value", "output")),
    *(f"block/feed_forward/{name}/bias" for name in ("up", "gate", "down", "shared/up", "shared/gate", "shared/down")),
    *(f"block/feed_forward/experts/{name}_bias" for name in ("up", "gate", "down")),
    "block/feed_forward/router/bias",
    *("block/attention_gain", "block/feed_forward_gain", "block/feed_forward_skip_gain"),
    *("block/attention/value/identity_gain", "block/attention/value/weight_gain"),
    *("block/attention/memory/bias", "block/feed_forward/router_bias"),
    *(f"block/attention/shaping/{name}" for name in ("identity", "weights", "uniform")),
    *("block/attention/span/fraction", "block/attention/sink"),
    *("block/attention/own", "block/attention/first"),
    *(f"block/{s}_{name}" for s, name in itertools.product(("attention", "feed_forward"), HYPER)),
    *(f"{place}_mix_{name}" for place in ("block/attention", "block/feed_forward", "end") for name in ("query", "gain")),
    *(f"block/attention/lambda_{part}_{i}" for part in ("query", "key") for i in (1, 2)),
}
SIZES = {"b": 2, "i": 3, "o": 4}


def kind_of(path: str) -> str:
    """The path without the names of the stack, and of the first and the second feed-forward layer of a block."""
    return re.sub(r"feed_forward_\d", "feed_forward", re.sub(r"^blocks/[^/]+/", "block/", path))


def letters(kind: str, ndim: int) -> str:
    """The roles of the dimensions of a parameter; only b if it is not a matrix."""
    forms = MATRICES[kind].split() if kind in MATRICES else ["b" * ndim]
    return next(form for form in forms if len(form) == ndim)


# {(kind, number of dimensions): its letters}
KINDS = {
    (kind_of(path), len(axes.letters)): axes
    for config in ALL.values()
    for path, axes in by_path(transformer.axes(config)).items()
}


def test_every_parameter_is_in_the_table():
    paths = {path for path, _ in KINDS}
    assert paths - MATRICES.keys() - OTHERS == set()
    assert MATRICES.keys() - paths == set()


def tree_of(value) -> dict:
    """value(kind, number of dimensions) of each kind of parameter, as a tree; kinds of two ranks are in two blocks."""
    tree = {}
    for kind, ndim in sorted(KINDS):
        *folders, name = kind.replace("block/", f"blocks/of_{ndim}/").split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value(kind, ndim)
    return tree


AXES = tree_of(lambda kind, ndim: KINDS[kind, ndim])


@pytest.fixture(scope="module")
def params():
    """A parameter of each kind."""
    random = np.random.default_rng(0)

    def draw(kind, ndim):
        sizes = [SIZES[letter] for letter in letters(kind, ndim)]
        return jnp.asarray(random.standard_normal(sizes), jnp.float32)

    return tree_of(draw)


def first_update(rule: str, params, gradients, decay: float) -> dict:
    """{path: update}, at a learning rate of 1."""
    config = OptimizerConfig(kind=rule, learning_rate=1.0, warmup=0, schedule="constant", weight_decay=decay, clip=0.0)
    optimizer = rule_of(config, 10, AXES)
    return by_path(jax.jit(lambda: optimizer.update(gradients, optimizer.init(params), params)[0])())


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_only_matrices_decay(rule, params):
    update = first_update(rule, params, jax.tree.map(jnp.zeros_like, params), decay=0.1)
    for path, param in by_path(params).items():
        expected = -0.1 * param if kind_of(path) in MATRICES else 0 * param
        np.testing.assert_allclose(update[path], expected, rtol=1e-6, err_msg=path)


def test_muon_updates_only_matrices(params):
    """Muon's update has the gradient's singular vectors and singular values close to each other. Adam's first update is
    the sign of the gradient."""
    update = first_update("muon", params, params, decay=0.0)
    for path, gradient in by_path(params).items():
        if kind_of(path) not in MATRICES:
            np.testing.assert_allclose(jnp.abs(update[path]), jnp.abs(update[path]).max(), rtol=1e-3, err_msg=path)
            continue
        for matrix, step in zip(*(matrices(leaf, kind_of(path)) for leaf in (gradient, update[path])), strict=True):
            left, _, right = np.linalg.svd(matrix, full_matrices=False)
            values = left.T @ -step @ right.T
            assert np.diag(values).max() < 2.5 * np.diag(values).min(), path
            assert np.abs(values - np.diag(np.diag(values))).max() < 1e-3 * values.max(), path


def matrices(leaf, kind: str):
    """[matrices, inputs, outputs]"""
    meanings = letters(kind, leaf.ndim)
    order = sorted(range(leaf.ndim), key=lambda i: "bio".index(meanings[i]))
    sizes = [math.prod(leaf.shape[i] for i in order if meanings[i] == letter) for letter in "bio"]
    return np.asarray(leaf).transpose(order).reshape(sizes)
