"""Unknown tokens and text that does not come back: their shares are told, and bits per byte are over the rest."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import normalizers

from tests.data import made_tokenizers as made
from tests.tiny_runs import make_run, rough_params, tiny_config
from xfresearch import evaluate
from xfresearch.compare import main as compare_main
from xfresearch.data import coverage
from xfresearch.data.pipeline import Batches, prepare
from xfresearch.data.tokenizers import ByteTokenizer, load_tokenizer
from xfresearch.data.tokenizers.hugging_face import HuggingFaceTokenizer
from xfresearch.data.tokenizers.sentence_piece import SentencePieceTokenizer
from xfresearch.evaluation.losses import summary
from xfresearch.loading.language_model import LanguageModel
from xfresearch.runtime.errors import UserError
from xfresearch.studies.measurement import check_coverage, of_frequencies
from xfresearch.train import main as train_main
from xfresearch.training import outline, session
from xfresearch.training.metrics import Clock

KNOWN = "the cat and the dog "  # of the made tokenizers
POEM = "\u6625\u7720\u4e0d\u89c9\u6653"  # five Chinese characters of three bytes


@pytest.fixture
def of_words(tmp_path):
    """The path of a tokenizer of whole words."""
    made.write(tmp_path / "words", {"vocab.txt": made.word_pieces()})
    return tmp_path / "words"


def counted(tokenizer, text: str) -> tuple[int, int]:
    return tuple(coverage.counts(tokenizer, text.encode(), tokenizer.encode(text.encode())).values())


def test_unknown_tokens_and_lost_bytes_are_counted(of_words):
    words = load_tokenizer(of_words)
    assert counted(words, KNOWN.strip()) == (0, 0) and counted(words, "the  Cat") == (0, 2)  # a space and a capital
    assert counted(words, f"the {POEM} cat") == (5, 16)  # with one of the two spaces
    pieces = SentencePieceTokenizer(made.sentence_piece(byte_fallback=False))
    assert counted(pieces, "the \u65e5") == (1, 3) and counted(pieces, "the cat") == (0, 0)
    assert counted(HuggingFaceTokenizer(made.byte_level(normalizer=normalizers.NFC())), "e\u0301") == (0, 3)
    assert counted(ByteTokenizer(), POEM) == (0, 0)


def config_of(tmp_path, text: str, tokenizer):
    (tmp_path / "text.txt").write_text(text)
    corpus = {"data__corpus": f"('text_files:{tmp_path}/text.txt',)", "data__tokenizer": tokenizer}
    return tiny_config(**corpus, data__cache_dir=f"{tmp_path}/cache", evaluation__split="train")


def test_bits_per_byte_are_over_the_text_that_comes_back(tmp_path, of_words):
    config = config_of(tmp_path, (KNOWN + POEM) * 200, of_words)
    split = prepare(config, "train")
    shares = coverage.shares(split.meta)
    assert shares["unknown_tokens"] == pytest.approx(0.5, abs=1e-3)
    assert shares["lost_bytes"] == pytest.approx(15 / 35, abs=0.02)  # and a space here and there
    kept = split.meta["n_bytes"] - split.meta["n_lost"]
    assert Batches(config).bytes_per_token() == kept / split.meta["n_tokens"]
    frequencies = of_frequencies(config)
    nats = frequencies["loss"] * frequencies["tokens"]
    assert frequencies["bits_per_byte"] == pytest.approx(nats / math.log(2) / kept, rel=0.02)
    told = outline.data_line(config, [split], split)
    assert told.count(f"({coverage.words(shares)}) to train on") == 1 and "50.0% of the tokens are unknown" in told
    assert coverage.warning("text", split.meta)[0].startswith("text: 50.0% of the tokens are unknown")


def test_a_text_that_comes_back_has_no_shares(tmp_path):
    made.write(tmp_path, {"tokenizer.json": made.byte_level()})
    split = prepare(config_of(tmp_path, KNOWN * 200, tmp_path / "tokenizer.json"), "train")
    assert split.byte_scale == 1 and coverage.shares(split.meta) == {} and coverage.warning("text", split.meta) == []
    assert coverage.words({}) == coverage.note({"loss": 1.0, "perplexity": 2.0}) == ""


def test_pairs_have_their_shares(tmp_path, of_words):
    (tmp_path / "pairs.tsv").write_text(f"source\ttarget\nthe cat\t{POEM}\n" * 1 + "the dog\tthe cat\n" * 3)
    options = {"data__corpus": f"('text_files:{tmp_path}/pairs.tsv',)", "data__tokenizer": of_words, "source_length": 16}
    config = tiny_config("t5", **options, data__objective__kind="seq2seq", sequence_length=16)
    known = coverage.shares(prepare(config, "train").meta)
    assert known["lost_bytes"] == pytest.approx(15 / (22 + 14 * 3)) and 5 / 40 < known["unknown_tokens"] < 5 / 20


def test_nothing_that_comes_back_has_no_bits_per_byte(tmp_path, of_words):
    sums = {name: np.ones(2) for name in ("nll", "correct", "tokens")} | {"bytes": np.zeros(2)}
    figures = summary(sums, {"n_tokens": 4, "n_bytes": 9, "n_unknown": 4, "n_lost": 9})
    assert "bits_per_byte" not in figures and figures["lost_bytes"] == figures["unknown_tokens"] == 1
    assert coverage.note(figures).endswith("100.0% of the text does not come back: so it has no bits per byte")
    config = config_of(tmp_path, POEM * 200, of_words)
    assert Batches(config).bytes_per_token() is None
    with pytest.raises(UserError, match="config.metric='bits_per_byte' .* 'loss' or 'accuracy' with tokenizer .*words"):
        check_coverage(SimpleNamespace(metric="bits_per_byte"), config)
    assert check_coverage(SimpleNamespace(metric="loss"), config).startswith("99.9% of the tokens are unknown")


def test_the_results_of_a_run_have_the_sentence_and_no_nan(tmp_path, capsys):
    figures = {"loss": 1.0, "perplexity": 2.7, "accuracy": 0.25, "unknown_tokens": 0.5, "lost_bytes": 1.0}
    result = SimpleNamespace(evaluation=figures, clock=Clock(), step=2)
    session._print(tiny_config(), tmp_path, {"unigram entropy": 5.0}, result, [], "", {})
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert lines[1].startswith("held-out accuracy") and lines[2].split() == ["0.250", "this", "model"] and len(lines) == 4
    assert lines[3] == coverage.note(figures) and "so it has no bits per byte" in lines[3]
    result.evaluation = figures | {"bits_per_byte": 9.0, "lost_bytes": 0.75}
    session._print(tiny_config(), tmp_path, {"unigram entropy": 5.0}, result, [], "", {})
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert "unigram entropy" in lines[3] and "75.0% of the text does not come back: bits per byte are over" in lines[4]


def test_evaluation_and_comparison_show_no_bits_per_byte(tmp_path, of_words, capsys):
    config = config_of(tmp_path, POEM * 200, of_words)
    LanguageModel(config.model, rough_params(config.model), load_tokenizer(of_words), config).save(tmp_path / "run")
    evaluate.main(["--workdir", f"{tmp_path}/run", "--json", f"{tmp_path}/out.json"])
    out, measured = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "bits_per_byte" not in measured and measured["lost_bytes"] == 1 and "nan" not in out
    assert "100.0% of the text does not come back: so it has no bits per byte" in out
    other = make_run(tmp_path / "other", data__corpus=repr(config.data.corpus), evaluation__split="train")
    why = f"RUN={tmp_path}/run is not allowed: .* nothing of the held-out text comes back from its tokens"
    with pytest.raises(UserError, match=why):
        compare_main([str(other), f"{tmp_path}/run"])


@pytest.mark.long
def test_a_run_of_unknown_tokens_says_so_before_training(tmp_path, of_words, capsys):
    (tmp_path / "poem.txt").write_text((POEM + "\n") * 2000)
    options = [f"--config.data.corpus=('text_files:{tmp_path}/poem.txt',)", f"--config.data.tokenizer={of_words}"]
    short = ["--config.steps=2", "--config.optimizer.warmup=0"]
    train_main(["--config", "configs/gpt2.py:tiny", "--workdir", f"{tmp_path}/run", *options, *short])
    out, err = capsys.readouterr()
    note = "of the tokens are unknown, 100.0% of the text does not come back"
    assert "nan" not in out and "entropy" not in out and f"{note}: so it has no bits per byte" in out
    assert err.count(note) == 4 and "bits/byte" not in err  # two in the line of the data, two warnings
    assert err.index("warning: ") < err.index("making the state")
    assert f"{note}: so it has no bits per byte" in (tmp_path / "run" / "report.html").read_text()
