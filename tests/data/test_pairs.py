"""Pairs of a source and a target: what is read, how rows are packed, and the batches of an encoder and a decoder."""

import json
from dataclasses import replace

import numpy as np
import pytest

from xfresearch.data.pairs.pair_packing import Pair, packed_rows, row, unpack
from xfresearch.data.pipeline import Batches, evaluation_batches, prepare
from xfresearch.data.tokenizers import ByteTokenizer, load_tokenizer
from xfresearch.options.objectives import Seq2Seq
from xfresearch.runtime.errors import UserError
from xfresearch.training.outline import data_line

END = 256  # of the byte tokenizer; its decoder starts from it too


@pytest.fixture
def make_pairs(make_config):
    """make_pairs(corpus, source_length, sequence_length, options of the objective...)"""

    def make(corpus, source_length=24, length=16, seed=0, **options):
        config = make_config(length, corpus=str(corpus), objective=Seq2Seq(**options), seed=seed)
        return replace(config, source_length=source_length)

    return make


def texts_of(batch) -> list[tuple[str, str]]:
    """The pairs of a batch, read from its arrays by their segment ids, in the order of rows."""
    found = []
    for b in range(len(batch["source"])):
        for segment in range(1, batch["segments"][b].max() + 1):
            source = batch["source"][b][batch["source_segments"][b] == segment]
            target = batch["targets"][b][batch["segments"][b] == segment]
            assert source[-1] == target[-1] == END
            read = batch["tokens"][b][batch["segments"][b] == segment]
            assert read.tolist() == [END, *target[:-1]]
            found.append((bytes(source[:-1].tolist()).decode(), bytes(target[:-1].tolist()).decode()))
    return found


def lines(count: int) -> list[tuple[str, str]]:
    return [(f"s{i} {'x' * (i % 7)}", f"t{i}{'y' * (i % 5)}") for i in range(count)]


def write_json(path, pairs, names=("source", "target")):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(dict(zip(names, pair, strict=True)) | {"n": 1}) + "\n" for pair in pairs))
    return path


@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_every_pair_is_in_one_row_and_reads_as_it_was_written(make_pairs, tmp_path, rows):
    write_json(tmp_path / "p" / "train.jsonl", lines(90)), write_json(tmp_path / "p" / "dev.jsonl", lines(3))
    config = make_pairs(tmp_path / "p", rows=rows)
    split = prepare(config, "train")
    batch = split.read(range(len(split)))
    assert sorted(texts_of(batch)) == sorted(lines(90))
    assert split.meta["n_pairs"] == 90 and not split.meta["n_longer"]
    assert (len(split) == 90) == (rows == "padded") and (rows == "padded" or len(split) < 60)
    assert np.array_equal(batch["weights"], batch["segments"] > 0)
    for positions, segments in (("positions", "segments"), ("source_positions", "source_segments")):
        for p_L, s_L in zip(batch[positions], batch[segments], strict=True):
            assert all(p_L[s_L == s].tolist() == list(range((s_L == s).sum())) for s in range(1, s_L.max() + 1))
    types = {name: values.dtype.name for name, values in batch.items()}
    assert types.pop("weights") == "float32" and set(types.values()) == {"int32"}
    assert {name: values.shape[1] for name, values in batch.items() if "source" in name} == dict.fromkeys(
        ("source", "source_segments", "source_positions"), 24
    )
    assert set(texts_of(prepare(config, "validation").read([0]))) <= set(lines(3))


def test_packed_rows_are_those_of_a_plain_best_fit():
    """The reference: of all open rows that fit a pair, it takes the one with the fewest free places."""
    rng = np.random.default_rng(0)
    pairs = [Pair(np.ones(rng.integers(2, 9)), np.full(rng.integers(1, 7), n)) for n in range(300)]
    open_rows, closed = [], []
    for pair in pairs:
        free = [(24 - sum(len(p.source) for p in r), 16 - sum(len(p.target) for p in r)) for r in open_rows]
        fits = [i for i, (s, t) in enumerate(free) if len(pair.source) <= s and len(pair.target) <= t]
        if fits:
            open_rows[min(fits, key=lambda i: sum(free[i]))].append(pair)
            continue
        if len(open_rows) == 32:
            closed.append(open_rows.pop(min(range(32), key=lambda i: sum(free[i]))))
        open_rows.append([pair])
    expected = [[int(p.target[0]) for p in r] for r in (*closed, *open_rows)]
    assert [[int(p.target[0]) for p in r] for r in packed_rows(pairs, 24, 16)] == expected


def test_a_decoder_starts_each_target_from_its_start():
    pairs = [Pair(np.array([5, 6, 1]), np.array([7, 8, 1])), Pair(np.array([9, 1]), np.array([4, 1]))]
    batch = unpack(row(pairs, 6, 7)[None], 6, 7, start=3)
    assert batch["source"].tolist() == [[5, 6, 1, 9, 1, 0]] and batch["source_segments"].tolist() == [[1, 1, 1, 2, 2, 0]]
    assert batch["tokens"].tolist() == [[3, 7, 8, 3, 4, 0, 0]] and batch["targets"].tolist() == [[7, 8, 1, 4, 1, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 2, 0, 0]] and batch["weights"].tolist() == [[1, 1, 1, 1, 1, 0, 0]]


def test_longer_pairs_are_left_out_and_counted(make_pairs, tmp_path):
    pairs = [("s" * 23, "t" * 15), ("s" * 24, "t"), ("s", "t" * 16), *lines(40)]
    write_json(tmp_path / "p" / "train.jsonl", pairs), write_json(tmp_path / "p" / "dev.jsonl", [("s" * 99, "t")])
    config = make_pairs(tmp_path / "p")
    split = prepare(config, "train")
    assert sorted(texts_of(split.read(range(len(split))))) == sorted([pairs[0], *lines(40)])
    assert split.meta["n_longer"] == 2
    with pytest.raises(UserError, match="dev.*|every pair is longer than config.source_length=24"):
        prepare(config, "validation")


def test_pairs_with_an_empty_side_are_left_out_and_counted(make_pairs, tmp_path):
    """A TSV of a translation has lines of which one side is missing."""
    for name, last in (("train", "a\t \n\tb\n\t\n"), ("dev", "")):
        rows = "".join(f"{source}\t{target}\n" for source, target in lines(20))
        (tmp_path / f"{name}.tsv").write_text(f"source\ttarget\n{rows}{last}")
    config = make_pairs(tmp_path)
    split, held_out = prepare(config, "train"), prepare(config, "validation")
    assert sorted(texts_of(split.read(range(len(split))))) == sorted(lines(20))
    assert (split.meta["n_pairs"], split.meta["n_empty"], split.meta["n_longer"]) == (20, 3, 0)
    assert "(without 3 empty pairs) to train on; validation" in data_line(config, [split], held_out)
    (tmp_path / "train.tsv").write_text("source\ttarget\na\t\n")
    with pytest.raises(UserError, match="train: the source or the target of every pair is empty"):
        prepare(config, "train")


def test_batches_are_a_function_of_the_step(make_pairs, tmp_path):
    config = make_pairs(write_json(tmp_path / "p.jsonl", lines(400)))
    whole = Batches(config).batch(7)
    some = Batches(config).batch(7, [0, 3])
    assert all(np.array_equal(whole[name][[0, 3]], some[name]) for name in whole)
    assert Batches(config).bytes_per_token() is None
    splits = [{s for s, _ in texts_of(prepare(config, split).read([0, 1]))} for split in ("train", "validation", "test")]
    assert not splits[0] & splits[1] and not splits[1] & splits[2]
    held_out = prepare(config, "validation")
    (whole,) = evaluation_batches(held_out, len(held_out) + 1)
    assert whole["source"].shape == (len(held_out) + 1, 24) and not whole["source_segments"][-1].any()


def test_columns_by_name_and_by_number(make_pairs, tmp_path):
    """A published TSV has no names, and quotation marks are text."""
    pairs = [(f'he said "{i}', f'"er {i}') for i in range(60)]
    for name, first in (("named", "de\tother\ten\n"), ("plain", "")):
        rows = "".join(f"{target}\tx\t{source}\n" for source, target in (lines(60) if first else pairs))
        (tmp_path / f"{name}.tsv").write_text(first + rows)
    for name, fields, expected in (("named", ("en", "de"), lines(60)), ("plain", ("3", "1"), pairs)):
        config = make_pairs(tmp_path / f"{name}.tsv", source_field=fields[0], target_field=fields[1])
        found = [prepare(config, split).read(range(len(prepare(config, split)))) for split in ("train", "validation")]
        assert set(texts_of(found[0])) | set(texts_of(found[1])) <= set(expected) and len(texts_of(found[0])) > 45


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ({}, '{"source": "a", "goal": "b"}', "p.jsonl:1: no field 'target'; fields present: source, goal .*target_field"),
        ({}, '{"source": "a", "target": 3}', "p.jsonl:1: field 'target' is a int; it must be a string"),
        ({"source_field": "sourc"}, '{"source": "a", "target": "b"}', "no field 'sourc'.*did you mean 'source'"),
    ],
)
def test_rows_without_a_pair_are_refused_with_their_place(make_pairs, tmp_path, options, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        prepare(make_pairs(tmp_path / "p.jsonl", **options), "train")


def test_a_corpus_that_is_neither_file_nor_task_is_refused(make_pairs, make_config):
    with pytest.raises(UserError, match="no file matches 'sorts'.*or a task: sort, reverse, .*did you mean 'sort'"):
        prepare(make_pairs("sorts"), "train")
    with pytest.raises(UserError, match="'sort' is a task with pairs: it needs data.objective.kind='seq2seq'"):
        prepare(make_config(corpus="sort"), "train")


def test_the_start_of_a_decoder_is_the_tokenizers(tmp_path):
    """A published model names it; that of BART is its end of text, though texts begin with <s>."""
    assert ByteTokenizer().decoder_start == END
    files = {"tokenizer.json": hub_tokenizer(), "config.json": json.dumps({"decoder_start_token_id": 2, "eos_token_id": 1})}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.decoder_start, tokenizer.end_of_text) == (2, 1)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").decoder_start == 2


def hub_tokenizer() -> str:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer, hf.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    hf.train_from_iterator(["ab"], trainers.BpeTrainer(special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet))
    return hf.to_str()
