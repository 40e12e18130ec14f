"""Hugging Face folders of random models with an encoder and a decoder: logits and the streams of both stacks, greedy
decoding, beam search and export equal `transformers`."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tolerances import TOLERANCE, median_error, relative_error

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

from safetensors.numpy import load_file  # noqa: E402

import xfresearch as xf  # noqa: E402
from tests.contracts.variants import random_params  # noqa: E402
from tests.interop.folders import assert_same_tensors  # noqa: E402
from tests.interop.record import PAIRS, RECORDED, pair_outputs  # noqa: E402
from tests.parity import hf_seq2seq  # noqa: E402
from tests.parity.hf_draws import ROUNDS, Draw  # noqa: E402
from tests.parity.hf_seq2seq import DRAWS, ENDS, START  # noqa: E402
from tests.parity.test_hf_keys import changes_of  # noqa: E402
from xfresearch.data.tokenizers import ByteTokenizer  # noqa: E402
from xfresearch.data.tokenizers.special_tokens import read  # noqa: E402
from xfresearch.loading.generating import generated  # noqa: E402
from xfresearch.models.model_config import with_dtype  # noqa: E402
from xfresearch.models.sampling import Beams, Sampling  # noqa: E402
from xfresearch.models.sources import padded  # noqa: E402
from xfresearch.run_config.config_files import parse  # noqa: E402

pytestmark = pytest.mark.parity

CASES = [(name, number) for name in DRAWS for number in range(ROUNDS)]
SOURCES, TARGET, COUNT = (17, 11), 13, 12  # tokens


class Case:
    """A random model, saved in float32 and in float64, sources of two lengths and tokens for the decoder."""

    def __init__(self, name: str, number: int, base):
        self.name, self.config = name, DRAWS[name](Draw(number))
        self.folders = {dtype: base / dtype for dtype in ("float32", "float64")}
        for dtype, folder in self.folders.items():
            hf_seq2seq.write_random(self.config, folder, number, dtype)
        random = np.random.default_rng(number)
        self.source = [random.integers(0, self.config.vocab_size, length).tolist() for length in SOURCES]
        self.tokens_BL = random.integers(0, self.config.vocab_size, (2, TARGET))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, tmp_path_factory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp(request.param[0]))


def taps(config, stack: str, states: list[str]) -> dict[str, str]:
    """{name of a value of `transformers`: our tap}: what the first layer reads, what each layer writes, the output."""
    inside = "encoder." if stack == "encoder" else ""
    names = ["embed", *(f"blocks.{number}.feed_forward.residual" for number in range(len(states) - 2)), "final"]
    return {f"{stack}.{number}": inside + name for number, name in enumerate(names)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_logits_and_streams_equal_those_of_transformers(case, dtype, parity):
    """The encoder's padding is left out: nothing reads it."""
    lm = xf.load(case.folders[dtype])
    expected = hf_seq2seq.outputs(case.folders[dtype], case.source, case.tokens_BL, dtype)
    source = padded(case.source)
    actual = np.asarray(lm(case.tokens_BL, source=source))
    assert str(actual.dtype) == dtype and 0.5 < np.abs(expected["logits"]).max() < 50
    parity("transformers", case.name, dtype, relative_error(actual, expected["logits"]))
    if dtype == "float32":  # the same parameters in float64: how much of the difference is each side's rounding
        exact = hf_seq2seq.outputs(case.folders["float64"], case.source, case.tokens_BL, "float64")["logits"]
        parity("transformers", f"{case.name}, ours from float64", dtype, relative_error(actual, exact))
        parity("transformers", f"{case.name}, theirs from float64", dtype, relative_error(expected["logits"], exact))
    names = {}
    for stack in ("encoder", "decoder"):
        names |= taps(lm.config, stack, [name for name in expected if name.startswith(stack) and name[-1].isdigit()])
    captured = lm.capture(case.tokens_BL, list(names.values()), source=source)
    for theirs, ours in names.items():
        for row, length in enumerate(SOURCES if ours.startswith("encoder.") else [TARGET] * 2):
            error = relative_error(captured[ours][row, :length], expected[theirs][row, :length])
            parity("transformers", f"{case.name}, streams", dtype, error)


@pytest.mark.parametrize("name", DRAWS)
def test_bfloat16_errors_are_as_small_as_those_of_transformers(name, tmp_path):
    """As in test_hf.py, but of many pairs: all tokens of a target read one source, so that their errors go together."""
    config, random = DRAWS[name](Draw(0)), np.random.default_rng(0)
    hf_seq2seq.write_random(config, tmp_path, 0, "bfloat16")
    source = [random.integers(0, config.vocab_size, length).tolist() for length in SOURCES * 12]
    tokens_BL = random.integers(0, config.vocab_size, (len(source), TARGET))
    exact = np.asarray(xf.load(tmp_path, dtype="float32")(tokens_BL, source=padded(source)))
    ours = xf.load(tmp_path)(tokens_BL, source=padded(source))
    theirs = hf_seq2seq.outputs(tmp_path, source, tokens_BL, "bfloat16")["logits"]
    error, their_error = (median_error(actual, exact) for actual in (ours, theirs))
    print(f"bfloat16, {name}: {error:.4f}, transformers {their_error:.4f}")
    assert 1e-4 < error < 1.5 * their_error


@pytest.mark.parametrize("name", PAIRS)
def test_recorded_outputs_are_current(name):
    recorded, now = load_file(RECORDED / f"{name}.safetensors"), pair_outputs(name, RECORDED / name)
    assert relative_error(recorded.pop("logits"), now.pop("logits")) < TOLERANCE["float32"]
    assert all(np.array_equal(recorded[key], now[key]) for key in now)


def ours(case: Case, how) -> list[list[int]]:
    """The texts of the float64 model, with the settings of its folder."""
    lm, settings = xf.load(case.folders["float64"]), read(case.folders["float64"])
    tokenizer = SimpleNamespace(stops=settings.stops, vocab_size=lm.config.vocab_size, forced=settings.forced)
    assert settings.decoder_start == START and settings.stops == tuple(ENDS)
    start = [[START] for _ in case.source]
    chunks = generated(lm.config, lm.params, tokenizer, start, padded(case.source), COUNT, how, 0, {})
    return [sum(texts, []) for texts in zip(*chunks, strict=True)]


def test_greedy_decoding_equals_that_of_transformers(case):
    """In float64, because in float32 rounding may decide between two tokens."""
    assert ours(case, Sampling(0.0)) == hf_seq2seq.texts(case.folders["float64"], case.source, COUNT, "float64")


@pytest.mark.parametrize("beams, penalty", [(2, 1.0), (3, 0.0), (4, 2.0), (5, -1.0)])
def test_beam_search_equals_that_of_transformers(case, beams, penalty):
    expected = hf_seq2seq.texts(case.folders["float64"], case.source, COUNT, "float64", beams, penalty)
    assert ours(case, Beams(beams, penalty)) == expected


def test_export_writes_the_same_folder(case, tmp_path):
    """The tensors are equal, and so are the logits, both of `transformers` and ours."""
    lm, source = xf.load(case.folders["float32"]), padded(case.source)
    lm.export_hf(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.folders["float32"])
    assert np.array_equal(xf.load(tmp_path / "out")(case.tokens_BL, source=source), lm(case.tokens_BL, source=source))
    folders = (tmp_path / "out", case.folders["float32"])
    again, expected = (hf_seq2seq.outputs(each, case.source, case.tokens_BL, "float32") for each in folders)
    assert all(np.array_equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", DRAWS)
def test_a_changed_key_is_obeyed_or_refused(name, tmp_path):
    """As in test_hf_keys.py. A key whose change `transformers` itself cannot run is skipped."""
    folder, source = tmp_path / "model", [[3, 9, 4, 11, 5, 8]]
    hf_seq2seq.write_random(DRAWS[name](Draw(1)), folder, 1, "float32")
    config = json.loads((folder / "config.json").read_text())
    tokens_BL = np.random.default_rng(1).integers(0, config["vocab_size"], (1, TARGET))
    wrong, compared = [], 0
    for what, changed in changes_of(config).items():
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            actual = np.asarray(xf.load(folder)(tokens_BL, source=source))
        except xf.UserError as error:
            assert "\n" not in str(error)
            continue
        try:
            expected = hf_seq2seq.outputs(folder, source, tokens_BL, "float32")["logits"]
        except Exception:  # its own checks raise many types
            continue
        compared += 1
        if expected.shape != actual.shape or relative_error(actual, expected) > TOLERANCE["float32"]:
            wrong.append(what)
    assert compared > 10
    assert not wrong


@pytest.mark.parametrize("name", ["t5:tiny", "t5:v1_1_tiny", "bart:tiny"])
def test_a_model_made_here_is_read_by_transformers(name, tmp_path, parity):
    """With special tokens that are not the family's, and its logits and beam search."""
    run = parse(["--config", name])
    model = with_dtype(replace(run.model, vocab_size=257), "float64")
    lm = xf.LanguageModel(model, random_params(model), ByteTokenizer(), run)
    lm.export_hf(tmp_path / "out")
    random = np.random.default_rng(0)
    source = [random.integers(0, 256, length).tolist() for length in SOURCES]
    tokens_BL = random.integers(0, 256, (2, TARGET))
    expected = hf_seq2seq.outputs(tmp_path / "out", source, tokens_BL, "float64")["logits"]
    parity("transformers", f"{name}, made here", "float64", relative_error(lm(tokens_BL, source=padded(source)), expected))
    found = hf_seq2seq.texts(tmp_path / "out", source, COUNT, "float64", 3, 1.0, ends=lm.tokenizer.stops)
    texts: list = [[], []]
    keep = lambda row, text, new: texts[row].extend(new)  # noqa: E731
    lm.generate(source=padded(source), beams=3, temperature=0.0, max_new_tokens=COUNT, stream=keep)
    assert texts == found
