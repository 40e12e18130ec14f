"""Edits of a model with an encoder: the subject stands in the source, so a memory of the encoder is edited, exactly."""

from dataclasses import replace
from importlib import import_module

import jax
import numpy as np
import pytest

from tests.contracts.two_stacks import MODELS, SOURCE
from tests.contracts.variants import in_float64, random_params
from tests.editing.words import WORDS, WordTokenizer
from tests.tiny_runs import tiny_config
from xfresearch import LanguageModel, UserError, editing
from xfresearch.analysis.prompts import prompt_of
from xfresearch.data.records import Record
from xfresearch.editing.keys import covariance
from xfresearch.editing.optimise import Settings, delta_for
from xfresearch.loading import edits

RECORD = Record("Ada", "{} is", " red", " blue", paraphrases=("Ada is a",))
MEMORY = "encoder.blocks.1.feed_forward"
CLOSE = 1e-9


@pytest.fixture
def lm(x64, monkeypatch) -> LanguageModel:
    """A model whose run has generated pairs of bytes, of which the covariance is, and a tokenizer of words."""
    for name in ("rome", "memit"):
        monkeypatch.setattr(import_module(f"xfresearch.editing.{name}"), "prefixes_of", lambda lm, seed: [""])
    config = replace(in_float64(MODELS["pre-norm"]), vocab_size=len(WORDS) + 1)
    run = tiny_config("tasks/reverse", source_length=SOURCE, sequence_length=8)
    return LanguageModel(config, random_params(config, seed=5), Pairs(), replace(run, model=config))


class Pairs(WordTokenizer):
    """Words with a space in front, but for a subject at the start; any other text, of a generated pair, has a word for each
    byte."""

    def _encode(self, text: bytes):
        words = text.decode().split()
        words = [word if not number and word in WORDS else f" {word}" for number, word in enumerate(words)]
        known = words and all(word in WORDS for word in words)
        return [WORDS.index(word) for word in words] if known else [byte % len(WORDS) for byte in text]


def written(lm, tap: str) -> np.ndarray:
    """The value of a tap at the subject, in the source of the request."""
    prompt = prompt_of(lm, RECORD)
    start = np.array([[lm.tokenizer.decoder_start]])
    return np.asarray(lm.capture(start, tap, source=np.array([prompt.tokens]))[tap][0, prompt.last])


def test_rome_writes_its_delta_at_the_subject_and_undo_restores_every_bit(lm):
    settings = Settings(steps=4)
    delta_D = delta_for(lm, MEMORY, [RECORD], [""], settings).delta_D
    edited, report = editing.rome(lm, [RECORD], MEMORY, tokens=200, settings=settings)
    change = written(edited, f"{MEMORY}.raw") - written(lm, f"{MEMORY}.raw")
    np.testing.assert_allclose(change, delta_D, rtol=CLOSE, atol=CLOSE)
    assert report.edits[0].losses[-1] < report.edits[0].losses[0]
    assert np.isfinite(report.drift_after.bits_per_byte)
    (applied,) = edited.edits
    assert list(applied.before) == [f"{MEMORY}.down.kernel"]
    restored = edits.undone(edited.config, edited.params, applied)
    jax.tree.map(np.testing.assert_array_equal, restored, lm.params)


def test_the_covariance_is_that_of_sources_without_padding(lm):
    actual = covariance(lm, MEMORY, tokens=5 * SOURCE)
    from xfresearch.analysis.sequences import sequences

    rows = sequences(lm, None, 5, split="train")
    m_TK = []
    for source, real in zip(rows.of_source.tokens_NL, rows.of_source.real_NL, strict=True):
        tap = f"{MEMORY}.coefficients"
        m_TK += [*np.asarray(lm.capture([[1]], tap, source=source[None, real])[tap][0])]
    assert not rows.of_source.real_NL.all()
    np.testing.assert_allclose(actual[0], np.einsum("tm,tn->mn", m_TK, m_TK) / len(m_TK), rtol=CLOSE, atol=CLOSE)


@pytest.mark.long
def test_memit_and_fine_tuning(lm):
    both = ("encoder.blocks.0.feed_forward", MEMORY)
    edited, _ = editing.memit(lm, [RECORD], both, tokens=200, settings=Settings(steps=2))
    assert set(edited.edits[0].before) == {f"encoder.blocks.{n}.feed_forward.down.kernel" for n in (0, 1)}
    edited, report = editing.finetune(lm, [RECORD], "blocks.1.feed_forward", rate=1e-2, steps=3)
    assert report.after.new[0] > report.before.new[0]
    assert list(edited.edits[0].before) == ["blocks.1.feed_forward.down.kernel"]


def test_a_memory_of_the_decoder_is_refused_where_the_subject_must_be_read(lm):
    for method in (editing.rome, lambda *given, **options: editing.memit(*given[:2], given[2:], **options)):
        with pytest.raises(UserError, match="='blocks.0.feed_forward' is not allowed with rome and memit: the subject"):
            method(lm, [RECORD], "blocks.0.feed_forward", tokens=64)
