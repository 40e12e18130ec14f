"""Hugging Face folders of random models, drawn anew each time besides fixed ones: read, run, written and read again.

Every family of hf_draws.DRAWS, so every one of interop/. XFRESEARCH_SEED=<the number in a failing test's name> repeats it.
"""

import os
import random

import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tolerances import relative_error

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.interop.folders import assert_same_tensors, choices, greedy, highest  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.parity.hf_draws import DRAWS, LENGTH, ROUNDS, Draw  # noqa: E402
from xfresearch.interop.families import FAMILIES  # noqa: E402
from xfresearch.interop.folder import read_config  # noqa: E402

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
    expected = hf_torch.greedy(case.folders["float64"], prompts, CONTINUATION, "float64")
    assert np.array_equal(greedy(lm, prompts, CONTINUATION), expected)


def test_export_writes_the_same_folder(case, tmp_path):
    """Tensor for tensor what was read, and the same model: for `transformers`, and for us, who read config.json here with
    `rope_theta` and `rope_scaling`, as folders on the Hub have it, and there with `rope_parameters`."""
    lm = xf.load(case.folders["float32"])
    lm.export_hf(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.folders["float32"])
    assert "rope_parameters" not in read_config(tmp_path / "out")
    assert np.array_equal(xf.load(tmp_path / "out")(case.tokens_BL), lm(case.tokens_BL))
    again = hf_torch.logits(tmp_path / "out", case.tokens_BL, "float32")
    assert np.array_equal(again, hf_torch.logits(case.folders["float32"], case.tokens_BL, "float32"))


@pytest.mark.parametrize("case", SPARSE, indirect=True, ids=named)
def test_router_choices_are_theirs(case):
    """In float64, and where no two experts are nearly as good."""
    lm, k = xf.load(case.folders["float64"]), case.config.num_experts_per_tok
    expected = hf_torch.router_logits(case.folders["float64"], case.tokens_BL, "float64")
    assert np.array_equal(choices(lm, case.tokens_BL, k), np.stack([highest(layer, k) for layer in expected]))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_bfloat16_in_shards(number, parity, tmp_path):
    """Weights in bfloat16 in many files: written as they were read, and the same model where both sides compute with them
    in float32 (in bfloat16 each side's own rounding is percents of a random model's logits)."""
    config, folder = DRAWS["llama"](Draw(number)), tmp_path / "in"
    hf_torch.write_random(config, folder, seed=number, dtype="bfloat16", max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    tokens_BL, lm = np.random.default_rng(number).integers(0, config.vocab_size, (2, LENGTH)), xf.load(folder)
    lm.export_hf(tmp_path / "out", shard_bytes=4000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_same_tensors(tmp_path / "out", folder)
    expected = hf_torch.logits(tmp_path / "out", tokens_BL, "float32")
    found = xf.load(folder, dtype="float32")(tokens_BL)
    parity("transformers", "llama, weights in bfloat16", "float32", relative_error(found, expected))


@pytest.mark.parametrize("name", DRAWS)
def test_bfloat16_is_as_far_from_float32_as_theirs(name, tmp_path):
    """Logits of the same weights in bfloat16, whose rounding is each side's own: of the same size, not the same numbers."""
    config = DRAWS[name](Draw(0))
    hf_torch.write_random(config, tmp_path, seed=0, dtype="bfloat16")
    tokens_BL = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH))
    exact = np.asarray(xf.load(tmp_path, dtype="float32")(tokens_BL))
    ours, theirs = xf.load(tmp_path)(tokens_BL), hf_torch.logits(tmp_path, tokens_BL, "bfloat16")
    error, their_error = (np.linalg.norm(exact - found) / np.linalg.norm(exact) for found in (ours, theirs))
    print(f"bfloat16, {name}: {error:.4f}, transformers {their_error:.4f}")
    assert 1e-4 < error < 1.5 * their_error


def test_float64_is_float64_throughout(tmp_path):
    """Without InFloat64, `transformers` computes parts of a float64 model in float32."""
    hf_torch.write_random(DRAWS["llama"](Draw(0)), tmp_path, seed=0, dtype="float64")
    tokens_BL = np.arange(LENGTH)[None] % 50
    found = np.asarray(xf.load(tmp_path)(tokens_BL))
    with torch.no_grad():
        mixed = hf_torch.read(tmp_path, "float64")(torch.from_numpy(tokens_BL)).logits.numpy()
    assert (
        relative_error(found, mixed)
        > 1e-9
        > 1e3 * relative_error(found, hf_torch.logits(tmp_path, tokens_BL, "float64"))
    )
