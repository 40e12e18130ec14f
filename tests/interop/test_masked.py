"""BERT and RoBERTa: recorded folders of `transformers` (record.py), what older folders have besides, and filling masks."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import xfresearch as xf
from tests.contracts.variants import random_params
from tests.data import made_tokenizers as made
from tests.interop.folders import assert_same_tensors
from tests.interop.record import MASKED, RECORDED
from tests.tiny_runs import tiny_config, tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import editing, generate, surgery
from xfresearch.data.tokenizers import ByteTokenizer, load_tokenizer
from xfresearch.data.tokenizers.hugging_face import HuggingFaceTokenizer
from xfresearch.interop.folder import read_config
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import read_object, write_json
from xfresearch.studies import probes


@pytest.fixture(scope="module")
def bert() -> xf.LanguageModel:
    return xf.load(RECORDED / "bert")


def recorded(name: str) -> tuple[dict, np.ndarray]:
    """The arguments of a call, and the logits of `transformers`."""
    arrays = load_file(RECORDED / f"{name}.safetensors")
    inputs = {f"{kind}_BL": arrays[kind] for kind in ("tokens", "segments")} | {"token_types_BL": arrays["types"]}
    return inputs, arrays["logits"]


def logits(lm: xf.LanguageModel, inputs: dict) -> np.ndarray:
    """Those of padding are 0."""
    return np.asarray(lm(**inputs)) * inputs["segments_BL"][..., None]


@pytest.mark.parametrize("name", MASKED)
def test_a_folder_computes_what_transformers_does_and_is_written_again(name, tmp_path):
    lm = xf.load(RECORDED / name)
    inputs, expected = recorded(name)
    assert 0.5 < np.abs(expected).max() < 50
    assert relative_error(logits(lm, inputs), expected) < TOLERANCE["float32"]
    assert lm.run.data.objective.kind == "masked"
    assert lm.export_hf(tmp_path / "out") == name
    assert_same_tensors(tmp_path / "out", RECORDED / name)
    again = read_config(tmp_path / "out")
    assert {key: again[key] for key in read_config(RECORDED / name)} == read_config(RECORDED / name)


def changed(folder: Path, change) -> Path:
    """A copy of the recorded BERT with changed tensors."""
    shutil.copytree(RECORDED / "bert", folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def as_in_2018(tensors: dict) -> dict:
    """With old names of gains and biases, copies of tied tensors, a pooler and a next-sentence head."""
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    ends = {name: next((end for end in old if name.endswith(end)), "") for name in tensors}
    renamed = {name.removesuffix(end) + old.get(end, ""): tensors[name] for name, end in ends.items()}
    renamed["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    renamed["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    renamed["bert.embeddings.position_ids"] = np.arange(32)[None]
    more = {"bert.pooler.dense.weight": (18, 18), "bert.pooler.dense.bias": (18,), "cls.seq_relationship.bias": (2,)}
    return renamed | {name: np.ones(shape, np.float32) for name, shape in more.items()}


def test_a_folder_of_2018_is_read_and_says_what_is_left_out(bert, tmp_path, capsys):
    lm = xf.load(changed(tmp_path / "old", as_in_2018))
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split(" is left out: ")[0].split(": ")[-1] for line in warnings] == ["the pooler", "the next-sentence head"]
    assert warnings[0].endswith("bert.pooler.dense.bias, bert.pooler.dense.weight")
    inputs, _ = recorded("bert")
    np.testing.assert_array_equal(logits(lm, inputs), logits(bert, inputs))
    lm.export_hf(tmp_path / "new")
    assert_same_tensors(tmp_path / "new", RECORDED / "bert")


@pytest.mark.parametrize("name", ["cls.predictions.decoder.bias", "cls.predictions.decoder.weight"])
def test_a_copy_that_differs_is_refused_in_one_line(name, tmp_path):
    folder = changed(tmp_path / "old", lambda tensors: (old := as_in_2018(tensors)) | {name: old[name] + 1})
    with pytest.raises(UserError, match=f"tensors {name} and .* differ"):
        xf.load(folder)


@pytest.mark.parametrize(
    "key, value", [("is_decoder", True), ("tie_word_embeddings", False), ("position_embedding_type", "relative_key")]
)
def test_what_bert_does_not_have_is_refused_in_one_line(key, value, tmp_path):
    folder = changed(tmp_path / "other", lambda tensors: tensors)
    write_json(folder / "config.json", read_config(folder) | {key: value})
    with pytest.raises(UserError, match=f"config.json: {key}={value!r} is not allowed"):
        xf.load(folder)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_model_without_types_is_refused_because_transformers_cannot_run_a_table_without_rows(family, tmp_path):
    lm = tiny_model("bert", model__token_types=0, model__position_offset=2 * (family == "roberta"))
    with pytest.raises(UserError, match=f"{family} cannot express this model: it differs from {family} in token_types=0"):
        lm.export_hf(tmp_path / "out", family)
    assert not (tmp_path / "out").exists()


REQUEST = {"subject": "Ada", "prompt": "{} lives in", "target": "Rome", "target_new": "Oslo"}


def test_a_model_that_sees_all_tokens_has_no_figures_of_next_tokens():
    """Its logits at a token depend on the next one, and on itself."""
    lm = tiny_model("bert")
    with pytest.raises(UserError, match=r"^loss does not apply to this model: .*fill .* --pseudo-perplexity[^\n]*$"):
        lm.loss("some words")
    for edit in (editing.rome, editing.finetune, editing.constrained_finetune):
        with pytest.raises(UserError, match="this model cannot be edited: it does not predict next tokens"):
            edit(lm, [REQUEST], memory="blocks.0.feed_forward")
    measured = probes.measure(lm, ("copying", "recall"))
    assert all(np.isnan(value) for value in measured.values())
    _, certificate = surgery.merge_query_key(lm)
    assert not certificate.bits_per_byte and "token types 0 to 1" in certificate.domain


@pytest.fixture
def with_words(bert, tmp_path) -> xf.LanguageModel:
    made.write(tmp_path, {"vocab.txt": made.word_pieces()})
    return xf.LanguageModel(bert.config, bert.params, load_tokenizer(tmp_path), bert.run)


def test_words_of_a_vocabulary_are_separated_by_line_ends_alone(tmp_path):
    """As in `transformers`: a word may hold U+2028, at which str.splitlines would cut it."""
    made.write(tmp_path, {"vocab.txt": "a\u2028b\n" + made.word_pieces()})
    assert load_tokenizer(tmp_path).encode(b"the cat").tolist() == [6, 7]


def test_masks_are_filled_with_the_likeliest_tokens(with_words):
    """A text is [CLS], its tokens and [SEP]. The second text is shorter, and padding does not change it."""
    texts = ["The [MASK] and the dog is [MASK].", "cats [MASK]"]
    words = {word: number for number, word in enumerate(made.BERT_WORDS)}
    rows = [["[CLS]", "the", "[MASK]", "and", "the", "dog", "is", "[MASK]", ".", "[SEP]"]]
    rows += [["[CLS]", "cat", "##s", "[MASK]", "[SEP]"]]
    filled = with_words.fill(texts, top_k=3)
    assert [len(each) for each in filled] == [2, 1] and with_words.fill(texts[1], top_k=3) == filled[1]
    for row, guesses in zip(rows, filled, strict=True):
        places = [place for place, word in enumerate(row) if word == "[MASK]"]
        p_LV = np.asarray(jax.nn.softmax(with_words([[words[word] for word in row]])[0]))
        for place, guess in zip(places, guesses, strict=True):
            best = np.argsort(-p_LV[place])[:3]
            np.testing.assert_allclose([p for _, p in guess], p_LV[place][best], rtol=1e-5)
            names = {number: word for word, number in words.items()}
            assert [text for text, _ in guess] == [names.get(number, f"<{number}>") for number in best]


def test_different_tokens_have_different_texts(with_words):
    """BERT's pieces inside a word, words with and without a space in front, and parts of a character."""
    texts = [text for text, _ in with_words.fill("the [MASK]", top_k=with_words.config.vocab_size)[0]]
    assert len(set(texts)) == len(texts) and {"a", "##b", "##s", "the"} <= {*texts}
    bytes_and_words = HuggingFaceTokenizer(made.byte_level())
    texts = [bytes_and_words.piece(number) for number in np.flatnonzero(bytes_and_words.byte_lengths).tolist()]
    assert len(set(texts)) == len(texts) and {"a", " a", "the", "\\xe6"} <= {*texts}


def test_a_text_is_read_between_the_tokens_of_its_begin_and_end(with_words):
    ids = [2, 5, 6, 3]
    assert with_words.encode("The cat") == ids and with_words.encode("the cat [SEP]", special_tokens=True) == ids
    np.testing.assert_array_equal(with_words("the cat"), with_words([ids]))


def test_a_tokenizer_without_a_mask_token_has_that_of_its_objective():
    run = tiny_config("bert")
    config = replace(run.model, vocab_size=258)
    lm = xf.LanguageModel(config, random_params(config), ByteTokenizer(), run)
    filled = lm.fill("a [MASK]", top_k=2)
    assert [len(guesses) for guesses in filled] == [2] and lm.config.vocab_size == lm.tokenizer.vocab_size + 1


def test_the_command_fills_masks(with_words, tmp_path, capsys):
    with_words.save(tmp_path / "run")
    flags = ["--workdir", str(tmp_path / "run"), "--fill", "--prompt", "the [MASK]", "--json", str(tmp_path / "out.json")]
    generate.main(flags)
    expected = with_words.fill("the [MASK]")
    [sample] = read_object(tmp_path / "out.json")["samples"]
    assert sample == {"prompt": "the [MASK]", "masks": [[list(guess) for guess in guesses] for guesses in expected]}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the [MASK]" and [f"{p:.1%}" in lines[1] for _, p in expected[0]] == [True] * 5 and len(lines) == 2
    with pytest.raises(UserError, match="--fill is not allowed with --source: masks are in prompts"):
        generate.main([*flags, "--source", "a"])


def test_filling_is_refused_in_one_line(with_words):
    with pytest.raises(UserError, match=r"text='the cat' is not allowed: it must have \[MASK\]"):
        with_words.fill("the cat")
    with pytest.raises(UserError, match="at most 32"):
        with_words.fill("[MASK] cat" * 20)
    causal = replace(with_words.config, causal=True)
    with pytest.raises(UserError, match="model.causal=True is not allowed: it must be False to fill masks"):
        xf.LanguageModel(causal, with_words.params, with_words.tokenizer, with_words.run).fill("[MASK]")
    with pytest.raises(UserError, match="model.causal=False"):
        with_words.generate("the cat")
