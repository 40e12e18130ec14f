"""Contract 5: every variant equals the NumPy reference model in tests/reference/, in the value of every tap.

Scanned and jitted, the default run has few variants; `long` has all. It follows that scanned equals unrolled (contract 3).
test_sharded.py compares their gradients.
"""

from functools import partial

import jax
import numpy as np
import pytest

from tests.contracts.passes import forward, run
from tests.contracts.variants import ALL, BATCH, DISTINCT, LENGTH, in_float64, marked, random_params, tokens_for
from tests.reference import model as reference
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.models.inputs import tap_shapes
from xfresearch.models.taps import captured


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


def check_taps(config, **context):
    """Every tap of the model has the value that the reference records. context: segments_BL, positions_BL."""
    params, tokens_BL, names = random_params(config), tokens_for(config), tap_shapes(config)
    result = captured(config, run(config, params, tokens_BL, record=names, **context)[1].captures, names)
    _, values = reference.passed(config, params, tokens_BL, **context)
    assert result.keys() <= values.keys()
    for name, value in result.items():
        dropped = values.get(f"{name.rpartition('.')[0]}.dropped")
        given, wanted = np.asarray(value), values[name]
        if dropped is not None and wanted.ndim == 4:  # an expert without room computes nothing
            given, wanted = (np.where(dropped[..., None], 0, each) for each in (given, wanted))
        assert relative_error(given, wanted) < TOLERANCE["float64"], name


TAPPED = ("base", "layout=", "attention.kind", "pattern", "memory-layers", "feed_forward.kind=moe")
TAPPED = [name for name in ALL if name.startswith(TAPPED)]


@pytest.mark.parametrize("name", marked(TAPPED, [name for name in ALL if ALL[name].causal]))
def test_every_tap_equals_the_reference_in_float64(name, x64):
    check_taps(in_float64(ALL[name]))


def packed(config) -> dict:
    """Two documents and padding in each row, of other lengths in each."""
    lengths = [(LENGTH // 2 + row % 3, LENGTH - LENGTH // 2 - 4) for row in range(BATCH)]
    rows = [[1] * first + [2] * second + [0] * (LENGTH - first - second) for first, second in lengths]
    positions = [[*range(first), *range(second), *range(LENGTH - first - second)] for first, second in lengths]
    return {"segments_BL": np.array(rows, np.int32), "positions_BL": np.array(positions, np.int32)}


PACKED = [name for name in ALL if ALL[name].causal]


@pytest.mark.parametrize("name", marked(["base", "attention.kind=differential", "feed_forward.kind=moe"], PACKED))
def test_every_tap_of_packed_documents_equals_the_reference_in_float64(name, x64):
    config = in_float64(ALL[name])
    check_taps(config, **packed(config))


# In a scan, norms, biases and identities run the same sublayers. Named configs consist of blocks that other variants have.
ALIKE = ("norm", "attention.qk_norm", "attention.query=identity", "attention.value=identity", "attention.key", "configs/")
ALIKE += ("attention.output_gate=head", "attention.bias", "feed_forward.bias", "layout=parallel_two_norms")


@pytest.mark.parametrize("name", marked([name for name in DISTINCT if not name.startswith(ALIKE)]))
def test_scanned_and_jitted_equals_the_reference_in_float32(name):
    check(ALL[name], "scan", TOLERANCE["float32"])
