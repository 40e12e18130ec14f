"""Hugging Face folders of random models of every family: import, logits, decoding and export equal `transformers`.

Each family has ROUNDS fixed draws and one new draw per run. XFRESEARCH_SEED=<the number in a failing test's name>
repeats the new draw.
"""

import os
import random

import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tolerances import median_error, relative_error

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.interop.folders import assert_same_tensors, choices, greedy, highest  # noqa: E402
from tests.parity import hf_seq2seq, hf_torch  # noqa: E402
from tests.parity.hf_draws import DRAWS, LENGTH, MASKED, ROUNDS, Draw  # noqa: E402
from xfresearch.interop.families import NAMES  # noqa: E402
from xfresearch.interop.folder import read_config  # noqa: E402

pytestmark = pytest.mark.parity

NEW = int(os.environ.get("XFRESEARCH_SEED") or random.SystemRandom().randrange(ROUNDS, 10**6))
CASES = [(name, number) for name in DRAWS for number in (*range(ROUNDS), NEW)]
MOE = [case for case in CASES if case[0] in ("mixtral", "olmoe", "qwen3_moe", "gpt_oss")]
PROMPT = 11
CONTINUATION = 12


class Case:
    """A random model, saved in float32 and in float64, and tokens for it."""

    def __init__(self, name: str, number: int, base):
        self.name = name
        self.number = number
        self.folders = {}
        self.config = DRAWS[name](Draw(number))
        for dtype in ("float32", "float64"):
            self.folders[dtype] = base / dtype
            hf_torch.write_random(self.config, base / dtype, seed=number, dtype=dtype)
        self.tokens_BL = np.random.default_rng(number).integers(0, self.config.vocab_size, (2, LENGTH))


def case_id(case: tuple) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.fixture(scope="module", params=CASES, ids=case_id)
def case(request, tmp_path_factory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp(request.param[0]))


def test_every_family_has_random_configs():
    assert {*DRAWS, *MASKED, *hf_seq2seq.DRAWS} == set(NAMES)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_equal_those_of_transformers(case, dtype, parity):
    actual = np.asarray(xf.load(case.folders[dtype])(case.tokens_BL))
    expected = hf_torch.logits(case.folders[dtype], case.tokens_BL, dtype)
    assert str(actual.dtype) == str(expected.dtype) == dtype and 0.5 < np.abs(expected).max() < 50
    parity("transformers", case.name, dtype, relative_error(actual, expected))


def test_greedy_continuation_equals_that_of_transformers(case):
    """In float64, because in float32 rounding may decide between two tokens."""
    prompts = case.tokens_BL[:, :PROMPT]
    lm = xf.load(case.folders["float64"])
    expected = hf_torch.greedy(case.folders["float64"], prompts, CONTINUATION, "float64")
    assert np.array_equal(greedy(lm, prompts, CONTINUATION), expected)


def test_export_writes_the_same_folder(case, tmp_path):
    """The tensors are equal, and so are the logits, both of `transformers` and ours. The exported config.json has
    `rope_theta` and `rope_scaling`, as folders on the Hub do; the original has `rope_parameters`. Only with these can OLMo 3
    have another theta in its sliding layers."""
    lm = xf.load(case.folders["float32"])
    lm.export_hf(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.folders["float32"])
    assert ("rope_parameters" in read_config(tmp_path / "out")) == (case.name == "olmo3")
    assert np.array_equal(xf.load(tmp_path / "out")(case.tokens_BL), lm(case.tokens_BL))
    again = hf_torch.logits(tmp_path / "out", case.tokens_BL, "float32")
    assert np.array_equal(again, hf_torch.logits(case.folders["float32"], case.tokens_BL, "float32"))


@pytest.mark.parametrize("case", MOE, indirect=True, ids=case_id)
def test_router_choices_equal_those_of_transformers(case):
    """In float64, where no two experts have nearly equal logits."""
    lm = xf.load(case.folders["float64"])
    k = case.config.num_experts_per_tok
    expected = hf_torch.router_logits(case.folders["float64"], case.tokens_BL, "float64")
    assert np.array_equal(choices(lm, case.tokens_BL, k), np.stack([highest(layer, k) for layer in expected]))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_bfloat16_weights_in_several_files(number, parity, tmp_path):
    """Export reproduces bfloat16 weights in many files, and both sides compute the same logits from them in float32.
    (In bfloat16, rounding, which differs between the sides, is some percent of a random model's logits.)"""
    config = DRAWS["llama"](Draw(number))
    folder = tmp_path / "in"
    hf_torch.write_random(config, folder, seed=number, dtype="bfloat16", max_shard_size="4KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    tokens_BL = np.random.default_rng(number).integers(0, config.vocab_size, (2, LENGTH))
    lm = xf.load(folder)
    lm.export_hf(tmp_path / "out", shard_bytes=4000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_same_tensors(tmp_path / "out", folder)
    expected = hf_torch.logits(tmp_path / "out", tokens_BL, "float32")
    actual = xf.load(folder, dtype="float32")(tokens_BL)
    parity("transformers", "llama, weights in bfloat16", "float32", relative_error(actual, expected))


@pytest.mark.parametrize("name", DRAWS)
def test_bfloat16_errors_are_as_small_as_those_of_transformers(name, tmp_path):
    """Compares errors against float32, not logits, because the two sides round differently in bfloat16: the median over
    tokens, because where rounding decides between two experts, all logits of a token differ."""
    config = DRAWS[name](Draw(0))
    hf_torch.write_random(config, tmp_path, seed=0, dtype="bfloat16")
    tokens_BL = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH))
    exact = np.asarray(xf.load(tmp_path, dtype="float32")(tokens_BL))
    ours = xf.load(tmp_path)(tokens_BL)
    theirs = hf_torch.logits(tmp_path, tokens_BL, "bfloat16")
    error, their_error = (median_error(actual, exact) for actual in (ours, theirs))
    print(f"bfloat16, {name}: {error:.4f}, transformers {their_error:.4f}")
    assert 1e-4 < error < 1.5 * their_error


def test_in_float64_is_needed_for_exact_logits(tmp_path):
    """Without InFloat64, `transformers` computes parts of a float64 model in float32."""
    hf_torch.write_random(DRAWS["llama"](Draw(0)), tmp_path, seed=0, dtype="float64")
    tokens_BL = np.arange(LENGTH)[None] % 50
    actual = np.asarray(xf.load(tmp_path)(tokens_BL))
    with torch.no_grad():
        mixed = hf_torch.read(tmp_path, "float64")(torch.from_numpy(tokens_BL)).logits.numpy()
    assert (
        relative_error(actual, mixed)
        > 1e-9
        > 1e3 * relative_error(actual, hf_torch.logits(tmp_path, tokens_BL, "float64"))
    )
