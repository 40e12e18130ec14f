"""Weight decay and Muon apply to matrices of linear maps and to nothing else, by the cases in tests/variants/.

As in GPT-2 and Llama, norms, gains, biases, embeddings and positions do not decay. Experts are matrices, and so are
slots of attention: keys and values of a layer that reads them by a softmax (Sukhbaatar et al. 2019, sec. 3). Muon's
authors use Adam for embeddings, the head and all vectors (Jordan et al. 2024).
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import ALL
from tests.training.rules import rule_of
from tests.variants import CASES, parameters
from tests.variants.case import NORM, NormCase
from xfresearch.models import transformer
from xfresearch.options.run_options import OptimizerConfig
from xfresearch.runtime.trees import by_path

OF_PATHS = [case for case in CASES if not isinstance(case, NormCase)]  # whose parameters are those of every place of a norm
# {path: the roles of its dimensions, for each number of dimensions}, of all cases
FORMS: dict[str, set[str]] = {}
for case in OF_PATHS:
    for path, parameter in parameters(case).items():
        FORMS.setdefault(path, set()).update(parameter.matrix.split())
MATRICES = {path for path, forms in FORMS.items() if forms}
SIZES = {"b": 2, "i": 3, "o": 4}


def kind_of(path: str) -> str:
    """The path without the names of the stack, and of the first and the second feed-forward layer of a block."""
    return re.sub(r"feed_forward_\d", "feed_forward", re.sub(r"^blocks/[^/]+/", "block/", path))


def letters(kind: str, ndim: int) -> str:
    """The roles of the dimensions of a parameter; only b if it is not a matrix."""
    forms = FORMS[kind] or ["b" * ndim]
    return next(form for form in forms if len(form) == ndim)


# {(kind, number of dimensions): its letters}
KINDS = {
    (kind_of(path), len(axes.letters)): axes
    for config in ALL.values()
    for path, axes in by_path(transformer.axes(config)).items()
}


def test_every_parameter_is_in_a_case():
    paths = {path for path, _ in KINDS}
    assert paths - FORMS.keys() == set()
    own = {path for case in OF_PATHS for path, parameter in case.parameters.items() if parameter is not NORM}
    assert own - paths == set()


def test_cases_agree_on_the_roles_of_dimensions():
    assert all(len({*map(len, forms)}) == len(forms) for forms in FORMS.values())


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
