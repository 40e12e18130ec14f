"""Hugging Face folders of random models, drawn anew each time besides fixed ones: read, run, written and read again.

Every family of hf_draws.DRAWS, so every one of interop/. XFRESEARCH_SEED=<the number in a failing test's name> repeats it.
"""

import os
import random

import jax
import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tolerances import relative_error

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.parity.hf_draws import DRAWS, LENGTH, ROUNDS, Draw  # noqa: E402
from xfresearch.interop.families import FAMILIES  # noqa: E402
from xfresearch.interop.folder import opened, stored_tensors  # noqa: E402
from xfresearch.models import decoding  # noqa: E402

pytestmark = pytest.mark.parity

NEW = int(os.environ.get("XFRESEARCH_SEED") or random.SystemRandom().randrange(ROUNDS, 10**6))
CASES = [(name, number) for name in DRAWS for number in (*range(ROUNDS), NEW)]
SPARSE = [case for case in CASES if case[0] in ("mixtral", "olmoe")]
PROMPT, CONTINUATION = 11, 12


class Case:
    """A drawn model in folders of both dtypes, and tokens for it."""

    def __init__(self, name: str, number: int, base):
        self.name, self.number, self.folders = name, number, {}
        self.config = DRAWS[name](Draw(number))
        for dtype in ("float32", "float64"):
            self.folders[dtype] = base / dtype
            hf_torch.write_random(self.config, base / dtype, seed=number, dtype=dtype)
        self.tokens_BL = np.random.default_rng(number).integers(0, self.config.vocab_size, (2, LENGTH))


def named(case: tuple) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.fixture(scope="module", params=CASES, ids=named)
def case(request, tmp_path_factory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp(request.param[0]))


@pytest.fixture(autouse=True)
def bits():
    """Reading a float64 folder switches JAX to 64 bits: back to what it was."""
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


def tensors(folder) -> dict[str, np.ndarray]:
    found = {}
    for name, stored in stored_tensors(folder).items():
        with opened(stored.file) as file:
            found[name] = file.get_tensor(name)
    return found


def assert_same_tensors(folder, expected) -> None:
    """The same names, dtypes and bits."""
    found, expected = tensors(folder), tensors(expected)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].tobytes() == tensor.tobytes(), f"{name} has other bits"


def test_every_family_is_drawn():
    assert set(DRAWS) == set(FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_are_theirs(case, dtype, parity):
    found = np.asarray(xf.load(case.folders[dtype])(case.tokens_BL))
    expected = hf_torch.logits(case.folders[dtype], case.tokens_BL, dtype)
    assert str(found.dtype) == str(expected.dtype) == dtype and 0.5 < np.abs(expected).max() < 50
    parity("transformers", case.name, dtype, relative_error(found, expected))


def test_greedy_continuation_is_theirs(case):
    """In float64: in float32 two tokens may be equally likely but for rounding."""
    prompts, lm = case.tokens_BL[:, :PROMPT], xf.load(case.folders["float64"])
    chunks = decoding.generate(lm.config, lm.params, prompts.tolist(), CONTINUATION, decoding.Sampling(temperature=0))
    found = [sum(chunk, []) for chunk in zip(*chunks, strict=True)]
    assert found == hf_torch.greedy(case.folders["float64"], prompts, CONTINUATION, "float64").tolist()


def test_export_writes_the_same_folder(case, tmp_path):
    """Tensor for tensor what was read, and for `transformers` the same model."""
    xf.load(case.folders["float32"]).export_hf(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.folders["float32"])
    again = hf_torch.logits(tmp_path / "out", case.tokens_BL, "float32")
    assert np.array_equal(again, hf_torch.logits(case.folders["float32"], case.tokens_BL, "float32"))


@pytest.mark.parametrize("case", SPARSE, indirect=True, ids=named)
def test_router_choices_are_theirs(case):
    """In float64, and where no two experts are nearly as good."""
    lm = xf.load(case.folders["float64"])
    expected = hf_torch.router_logits(case.folders["float64"], case.tokens_BL, "float64")
    names = [f"blocks.{layer}.feed_forward.router_logits" for layer in range(lm.config.depth)]
    found, k = lm.capture(case.tokens_BL, names), case.config.num_experts_per_tok
    assert len(expected) == len(names)
    for name, layer_BLE in zip(names, expected, strict=True):
        assert np.array_equal(np.argsort(found[name])[..., -k:], np.argsort(layer_BLE)[..., -k:])
