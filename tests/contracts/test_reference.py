"""Contract 5: every variant equals the NumPy reference model in tests/models/reference.py.

Scanned and jitted, the default run has few variants; `long` has all. It follows that scanned equals unrolled (contract 3).
test_sharded.py compares their gradients.
"""

from functools import partial

import jax
import numpy as np
import pytest

from tests.contracts.passes import forward
from tests.contracts.variants import ALL, DISTINCT, in_float64, marked, random_params, tokens_for
from tests.models import reference
from tests.tolerances import TOLERANCE, relative_error


def expected(config, params, tokens_BL):
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    logits, losses = zip(*(reference.model(config, params, tokens) for tokens in tokens_BL), strict=True)
    return np.stack(logits), {name: np.array([each[name] for each in losses]) for name in losses[0]}


def check(config, layers, tolerance):
    params = random_params(config)
    tokens_BL = tokens_for(config)
    run = partial(forward, config, tokens_BL=tokens_BL, layers=layers)
    logits, losses = (jax.jit(run) if layers == "scan" else run)(params)
    expected_logits, expected_losses = expected(config, params, tokens_BL)
    assert relative_error(logits, expected_logits) < tolerance
    assert losses.keys() == expected_losses.keys()
    for name, value in losses.items():
        assert relative_error(value, expected_losses[name]) < tolerance, name


@pytest.mark.parametrize("name", ALL)
def test_unrolled_equals_the_reference_in_float64(name, x64):
    check(in_float64(ALL[name]), "unroll", TOLERANCE["float64"])


# In a scan, norms, biases and identities run the same sublayers. Named configs consist of blocks that other variants have.
ALIKE = ("norm", "attention.qk_norm", "attention.query=identity", "attention.value=identity", "attention.key", "configs/")
ALIKE += ("attention.output_gate=head", "attention.bias", "feed_forward.bias", "layout=parallel_two_norms")


@pytest.mark.parametrize("name", marked([name for name in DISTINCT if not name.startswith(ALIKE)]))
def test_scanned_and_jitted_equals_the_reference_in_float32(name):
    check(ALL[name], "scan", TOLERANCE["float32"])
