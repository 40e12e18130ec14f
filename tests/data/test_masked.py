"""Masked tokens: what BERT's rules give, counted; batches that resume; what a config refuses; a run and its evaluation."""

import json

import numpy as np
import pytest

from tests.contracts.variants import ROOT
from xfresearch import evaluate
from xfresearch.data.objectives import HELD_OUT, generators
from xfresearch.data.objectives.masked import Masked
from xfresearch.data.pipeline import Batches, prepare
from xfresearch.data.tokenizers import ByteTokenizer, load_tokenizer, vocab_size
from xfresearch.options.objectives import Masked as Options
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError
from xfresearch.train import main as train_main

TINY = ["--config", f"{ROOT}/configs/gpt2.py:tiny", "--config.data.objective.kind=masked", "--config.model.causal=False"]
MASK = 257  # the id after the bytes and their separator


def rows(B: int = 200, L: int = 64) -> dict[str, np.ndarray]:
    """Rows of random bytes: two separators in each, and padding at the end."""
    tokens_BL = np.random.default_rng(0).integers(256, size=(B, L)).astype(np.int32)
    tokens_BL[:, [9, 40]] = 256
    segments_BL = np.broadcast_to((np.arange(L) < L - 4).astype(np.int32), (B, L))
    return {"tokens": tokens_BL, "targets": tokens_BL, "segments": segments_BL, "weights": np.ones((B, L), np.float32)}


@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_counts_and_shares_are_those_of_bert(rate):
    clean = rows()
    batch = Masked.of(Options(rate=rate), ByteTokenizer())(clean, generators(0, range(200)))
    tokens, targets, chosen = batch["tokens"], batch["targets"], batch["weights"] > 0
    assert np.array_equal(targets, clean["tokens"]) and np.array_equal(tokens[~chosen], targets[~chosen])
    assert (chosen.sum(1) == round(rate * (64 - 4 - 2))).all()  # without padding and separators
    assert not chosen[:, -4:].any() and not (chosen & (targets == 256)).any()
    masked = (tokens == MASK)[chosen].mean()
    changed = ((tokens != targets) & (tokens != MASK))[chosen].mean()
    assert masked == pytest.approx(0.8, abs=0.03) and changed == pytest.approx(0.1 * 256 / 257, abs=0.03)


def test_a_row_without_text_predicts_nothing_and_a_short_one_predicts_one_token():
    clean = {name: values[:2].copy() for name, values in rows().items()}
    clean["segments"][0], clean["segments"][1, 2:] = 0, 0
    batch = Masked.of(Options(), ByteTokenizer())(clean, generators(0, range(2)))
    assert batch["weights"].sum(1).tolist() == [0, 1]


def test_draws_depend_on_the_seed_and_the_place_in_training_and_on_the_index_in_evaluation(make_config, text_dir):
    text = "".join(f"{i:07d}\n" for i in range(40))
    masked = {"objective": Options(), "corpus": text_dir({"a.txt": text})}
    config = make_config(batch_size=8, **masked)
    batches, held_out = Batches(config), prepare(config, "train")
    epoch = len(held_out)
    whole = batches.batch(3)
    some = Batches(config).batch(3, [1, 5])
    assert all(np.array_equal(whole[name][[1, 5]], some[name]) for name in whole)
    assert not np.array_equal(whole["weights"], Batches(config, seed=1).batch(3)["weights"])
    one = make_config(batch_size=1, **masked)
    seen = [Batches(one).batch(step) for step in range(2 * epoch)]
    drawn = [(tuple(batch["targets"][0]), tuple(batch["weights"][0])) for batch in seen]
    first, again = drawn[:epoch], drawn[epoch:]
    assert sorted(t for t, _ in first) == sorted(t for t, _ in again) and len(set(first) & set(again)) < epoch / 4
    twice = [held_out.read([0, 3]), held_out.read([3, 0])]
    assert all(np.array_equal(twice[0][name], twice[1][name][::-1]) for name in twice[0])
    assert HELD_OUT > 2**31


def test_the_mask_is_the_tokenizers_own_or_one_more_id(tmp_path):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<mask>"]
    hf.train_from_iterator(["ab"], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    hf.save(str(tmp_path / "tokenizer.json"))
    own = load_tokenizer(tmp_path)
    assert Masked.of(Options(), own).mask == 2 and set(Masked.of(Options(), own).special) == {0, 1, 2}
    config = parse(TINY)
    assert vocab_size(config.data, own) == own.vocab_size
    assert vocab_size(config.data) == vocab_size(config.data, ByteTokenizer()) == MASK + 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.causal=True"], "model.causal=True is not allowed: it must be False with data.objective.kind='masked'"),
        (["data.objective.kind=next"], "model.causal=False is not allowed: it must be True to train on next tokens"),
        (["data.objective.random_share=0.3"], "data.objective.random_share=0.3 is not allowed: it must be at most 1 with"),
        (["data.objective.noise_density=0.3"], "there is no key 'noise_density'"),
        (["data.corpus=('majority',)"], "data.objective.kind='masked' is not allowed: it must be 'next' with a data set"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        parse([*TINY, *(f"--config.{each}" for each in overrides)])


def test_a_run_learns_and_is_evaluated_as_it_was_trained(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("aaaaaaaabbbbbbbb" * 400)
    flags = [f"--config.data.corpus=('{tmp_path / 'a.txt'}',)", "--config.log.tracker=jsonl", "--config.evaluation.every=30"]
    flags += ["--config.steps=30", "--config.checkpoint.every=15", "--json", str(tmp_path / "run.json")]
    train_main([*TINY, *flags, "--workdir", str(tmp_path / "run")])
    results = json.loads((tmp_path / "run.json").read_text())
    assert results["samples"] == [] and results["baselines"] == {} and "bits_per_byte" not in results["evaluation"]
    assert results["evaluation"]["loss"] < 0.8 * np.log(2)  # it reads the letters beside the mask
    evaluate.main(["--workdir", str(tmp_path / "run"), "--json", str(tmp_path / "again.json")])
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["loss"] == pytest.approx(results["evaluation"]["loss"], rel=1e-5)
    assert "held-out accuracy" in capsys.readouterr().out
