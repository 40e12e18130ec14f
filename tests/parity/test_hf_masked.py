"""BERT and RoBERTa: padded rows with token types, exports, tokenizers and filled masks equal those of `transformers`.

Each family has ROUNDS fixed draws and one new draw per run, as in test_hf.py.
"""

import shutil

import numpy as np
import pytest

from tests.parity.weights import MISSING
from tests.tolerances import median_error, relative_error

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

import xfresearch as xf  # noqa: E402
from tests.data import made_tokenizers as made  # noqa: E402
from tests.interop.folders import assert_same_tensors  # noqa: E402
from tests.interop.record import MASKED as RECORDED_MODELS  # noqa: E402
from tests.interop.record import RECORDED, masked_outputs  # noqa: E402
from tests.parity import hf_torch  # noqa: E402
from tests.parity.hf_draws import LENGTH, MASKED, ROUNDS, Draw  # noqa: E402
from tests.parity.test_hf import NEW  # noqa: E402
from xfresearch.data.tokenizers import load_tokenizer  # noqa: E402

pytestmark = pytest.mark.parity
TEXTS = ["the [MASK] and the dogs", "a [MASK] is the [MASK].", "[MASK]"]


def inputs(config) -> tuple[np.ndarray, ...]:
    """Tokens without padding's id, segments of rows of different lengths, and token types."""
    rng = np.random.default_rng(config.vocab_size)
    segments_BL = (np.arange(LENGTH) < np.array([[LENGTH], [LENGTH - 6], [3]])).astype(np.int64)
    padding = config.pad_token_id or 0
    tokens_BL = np.where(segments_BL, rng.integers(2, config.vocab_size, segments_BL.shape), padding)
    return tokens_BL, segments_BL, rng.integers(0, config.type_vocab_size, segments_BL.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("number", (*range(ROUNDS), NEW))
@pytest.mark.parametrize("name", MASKED)
def test_logits_of_padded_rows_equal_those_of_transformers(name, number, dtype, parity, tmp_path):
    config = MASKED[name](Draw(number))
    hf_torch.write_random(config, tmp_path / "in", seed=number, dtype=dtype)
    tokens_BL, segments_BL, types_BL = inputs(config)
    expected = hf_torch.logits_of_padded(tmp_path / "in", tokens_BL, segments_BL, types_BL, dtype)
    lm = xf.load(tmp_path / "in")
    actual = np.asarray(lm(tokens_BL, segments_BL=segments_BL, token_types_BL=types_BL))
    actual = np.where(segments_BL[..., None], actual, np.zeros((), actual.dtype))
    assert str(actual.dtype) == str(expected.dtype) == dtype and 0.5 < np.abs(expected).max() < 50
    parity("transformers", name, dtype, relative_error(actual, expected))
    lm.export_hf(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path / "in")
    again = hf_torch.logits_of_padded(tmp_path / "out", tokens_BL, segments_BL, types_BL, dtype)
    assert np.array_equal(again, expected)


@pytest.mark.parametrize("name", MASKED)
def test_bfloat16_errors_are_as_small_as_those_of_transformers(name, tmp_path):
    """As in test_hf.py, of the tokens that are no padding."""
    config = MASKED[name](Draw(0))
    hf_torch.write_random(config, tmp_path, seed=0, dtype="bfloat16")
    tokens_BL, segments_BL, types_BL = inputs(config)
    given = {"segments_BL": segments_BL, "token_types_BL": types_BL}
    exact, ours = (np.asarray(xf.load(tmp_path, dtype=dtype)(tokens_BL, **given)) for dtype in ("float32", ""))
    theirs = hf_torch.logits_of_padded(tmp_path, tokens_BL, segments_BL, types_BL, "bfloat16")
    real = segments_BL > 0
    error, their_error = (median_error(actual[real], exact[real]) for actual in (ours, theirs))
    print(f"bfloat16, {name}: {error:.4f}, transformers {their_error:.4f}")
    assert 1e-4 < error < 1.5 * their_error


@pytest.mark.parametrize("name", RECORDED_MODELS)
def test_recorded_outputs_are_current(name):
    from safetensors.numpy import load_file

    recorded, now = load_file(RECORDED / f"{name}.safetensors"), masked_outputs(name, RECORDED / name)
    assert relative_error(recorded.pop("logits"), now.pop("logits")) < 1e-5
    assert all(np.array_equal(recorded[key], now[key]) for key in now)


def folder_of(kind: str, name: str, path):
    """A recorded model with the files of a tokenizer: vocab.txt, or RoBERTa's two files."""
    shutil.copytree(RECORDED / name, path)
    bert = {"tokenizer_class": "BertTokenizer"}
    files = {
        "vocab.txt": {"vocab.txt": made.word_pieces(), "tokenizer_config.json": bert},
        "cased": {"vocab.txt": made.word_pieces(), "tokenizer_config.json": bert | {"do_lower_case": False}},
        "two files": made.roberta() | {"tokenizer_config.json": {"tokenizer_class": "RobertaTokenizer"}},
    }
    made.write(path, files[kind])
    return path


@pytest.mark.parametrize("kind, name", [("vocab.txt", "bert"), ("cased", "bert"), ("two files", "roberta")])
def test_tokens_equal_those_of_transformers(kind, name, tmp_path):
    """RoBERTa's published tokenizer.json strips the space before a mask, as we do. Made of two files, that of `transformers`
    does not."""
    folder = folder_of(kind, name, tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "saved")
    for path in (folder, tmp_path / "saved"):
        ours = load_tokenizer(path)
        ends = theirs.sep_token_id if name == "bert" else theirs.eos_token_id
        assert (ours.begin_of_text, ours.after_text, ours.end_of_text) == (theirs.cls_token_id, ends, ends)
        for text in ("the cat and the dogs", "A the.", "The\u00e9 cats  is", "a, b", ""):
            assert [theirs.cls_token_id, *ours.encode(text.encode()).tolist(), ends] == theirs(text).input_ids
        masked = TEXTS[2 if kind == "two files" else 1].replace("[MASK]", theirs.mask_token)
        assert [theirs.cls_token_id, *ours.encode_special(masked), ends] == theirs(masked).input_ids


@pytest.mark.parametrize("kind", ["vocab.txt", "cased"])
def test_filled_masks_equal_those_of_the_pipeline(kind, tmp_path):
    folder = folder_of(kind, "bert", tmp_path / "model")
    lm = xf.load(folder)
    model, tokenizer = hf_torch.read(folder, "float32"), transformers.AutoTokenizer.from_pretrained(folder)
    for text, filled in zip(TEXTS, lm.fill(TEXTS, top_k=3), strict=True):
        encoded = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            p_LV = model(**encoded).logits[0].softmax(-1).numpy()
        places = np.flatnonzero(encoded.input_ids[0].numpy() == tokenizer.mask_token_id)
        assert len(filled) == len(places)
        for place, guesses in zip(places, filled, strict=True):
            np.testing.assert_allclose([p for _, p in guesses], np.sort(p_LV[place])[::-1][:3], rtol=1e-4)
            best = np.argsort(-p_LV[place], kind="stable")[:3]
            assert [text for text, _ in guesses] == [tokenizer.decode([number]) or f"<{number}>" for number in best]
