import json
import threading
import time

import numpy as np
import pytest

from tests.data import made_tokenizers as made
from tests.data.conftest import shared
from xfresearch.data.pipeline import Batches, Prefetch, evaluation_batches, prepare, stream_tokens
from xfresearch.data.tokenizers import tokenizer_for


def same(left: dict, right: dict) -> bool:
    return all(np.array_equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)


@pytest.fixture
def two_corpora(make_config, text_dir):
    """A config of two corpora with weights 3 to 1; their lines start with a and with b."""
    first = text_dir({"a.txt": "".join(f"a{i:06d}\n" for i in range(600))}, "first")
    second = text_dir({"b.txt": "".join(f"b{i:06d}\n" for i in range(60))}, "second")
    return make_config(corpus=(first, second), weights=(3.0, 1.0), batch_size=8)


def test_batch_is_a_pure_function_of_seed_and_step(two_corpora):
    batches, again = Batches(two_corpora), Batches(two_corpora)
    late = again.batch(7)
    assert same(batches.batch(7), late) and same(batches.batch(3), again.batch(3)) and same(batches.batch(7), late)
    assert not same(batches.batch(7), batches.batch(8))
    assert not same(batches.batch(7), Batches(two_corpora, seed=1).batch(7))


@pytest.mark.parametrize("rows", [[0], [7], [1, 2], [0, 3, 4, 7], list(range(8))])
def test_rows_equal_those_of_the_whole_batch_and_no_other_row_is_read(two_corpora, rows, monkeypatch):
    batches, read = Batches(two_corpora), []
    whole = {step: batches.batch(step) for step in (0, 5, 100)}
    reading = type(batches.corpora[0]).read
    monkeypatch.setattr(type(batches.corpora[0]), "read", lambda self, i: read.extend(i) or reading(self, i))
    for step, batch in whole.items():
        assert same({name: values[rows] for name, values in batch.items()}, batches.batch(step, rows))
    assert len(read) == 3 * len(rows)


def test_batch_shapes_and_dtypes(two_corpora):
    batch = Batches(two_corpora).batch(0)
    types = {name: values.dtype.name for name, values in batch.items()}
    assert types == {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
        "segments": "int32",
        "positions": "int32",
    }
    assert all(values.shape == (8, 16) for values in batch.values())
    assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 9.0), ()])
def test_bytes_per_token_are_those_of_the_mixed_batches(make_config, text_dir, weights):
    """The second corpus has a separator after every other byte, and a tenth of the text."""
    first = text_dir({"a.txt": "a" * 8000}, "first")
    second = text_dir({f"{i:03}.txt": "b" for i in range(800)}, "second")
    batches = Batches(make_config(corpus=(first, second), weights=weights, batch_size=8))
    tokens = np.concatenate([batches.batch(step)["tokens"] for step in range(200)])
    assert batches.bytes_per_token() == pytest.approx((tokens < 256).mean(), abs=0.01)


def test_corpora_are_mixed_by_weight(two_corpora):
    batches = Batches(two_corpora)
    tokens = np.concatenate([batches.batch(step)["tokens"] for step in range(100)])
    share = np.mean((tokens == ord("a")).any(axis=1))
    assert share == pytest.approx(0.75, abs=0.01)


def test_every_epoch_has_every_sequence_once_in_a_new_order(make_config, text_dir):
    corpus = text_dir({"a.txt": "".join(f"{i:07d}\n" for i in range(100))})
    batches = Batches(make_config(corpus=corpus, batch_size=1, sequence_length=8))
    n = len(batches.corpora[0])
    epochs = [
        [bytes(batches.batch(step)["tokens"][0].astype(np.uint8)) for step in range(epoch * n, (epoch + 1) * n)]
        for epoch in range(3)
    ]
    assert all(len(set(epoch)) == n for epoch in epochs) and set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])


def test_iterate_makes_batches_in_order(two_corpora):
    batches = Batches(two_corpora)
    with batches.iterate(3, 9, rows=[4, 5, 6, 7]) as steps:
        for number, (step, batch) in enumerate(steps, 3):
            assert step == number and np.array_equal(batch["tokens"], batches.batch(step)["tokens"][4:])
    assert number == 8


def test_iterate_makes_batches_in_one_other_thread_no_further_ahead_than_prefetch(two_corpora, monkeypatch):
    made = []
    monkeypatch.setattr(Batches, "batch", lambda self, step, rows: made.append(threading.get_ident()))
    with Batches(two_corpora).iterate(0, 10_000) as steps:
        next(steps)
        time.sleep(0.3)
        assert len(made) <= two_corpora.data.prefetch + 1
        assert threading.get_ident() not in made and len(set(made)) == 1
    assert not any(thread.name.startswith("prefetch") and thread.is_alive() for thread in threading.enumerate())


def test_prefetch_raises_an_error_at_its_step():
    def make(step):
        return 1 / (3 - step)

    with Prefetch(make, range(8), ahead=4) as steps:
        assert [next(steps)[0] for _ in range(3)] == [0, 1, 2]
        assert isinstance(steps._waiting[0][1].exception(), ZeroDivisionError) and not steps.ready()
        with pytest.raises(ZeroDivisionError):
            next(steps)


def test_stream_packing_joins_documents_with_the_separator(make_config, text_dir):
    config = make_config(corpus=text_dir({f"{i:03d}.txt": f"document {i}" for i in range(200)}), sequence_length=32)
    tokenizer = tokenizer_for(config.data)
    tokens, documents = stream_tokens(config, "train")
    packed = prepare(config, "train")
    texts = bytes_of(tokenizer, tokens)
    assert packed.meta["n_documents"] == len(texts) == documents[-1] + 1
    assert packed.meta["n_tokens"] == len(tokens) == packed.meta["n_bytes"] + len(texts) - 1
    assert [tokenizer.decode(tokens[documents == i]) for i in range(len(texts))] == texts
    for i in (0, 5, len(packed) - 1):
        assert np.array_equal(packed[i]["tokens"], tokens[i * 32 : i * 32 + 32])
        assert np.array_equal(packed[i]["targets"], tokens[i * 32 + 1 : i * 32 + 33])


def bytes_of(tokenizer, tokens):
    return [
        tokenizer.decode(part[part != tokenizer.end_of_text])
        for part in np.split(tokens, np.flatnonzero(tokens == tokenizer.end_of_text) + 1)
    ]


def test_document_packing_of_a_prepared_split(make_config, text_dir):
    corpus = text_dir({f"{i:03d}.txt": f"text {i} " * (1 + i % 7) for i in range(200)})
    config = make_config(corpus=corpus, packing="documents", sequence_length=40)
    packed = prepare(config, "train")
    tokens, documents = stream_tokens(config, "train")
    assert packed.meta["n_tokens"] == packed.meta["n_bytes"] + packed.meta["n_documents"] == len(tokens)
    assert tokens[-1] == 256 and np.array_equal(
        np.flatnonzero(tokens == 256)[:-1] + 1, np.flatnonzero(np.diff(documents)) + 1
    )
    weights = sum(packed[i]["weights"].sum() for i in range(len(packed)))
    assert weights == packed.meta["n_predictions"] == len(tokens) - packed.meta["n_documents"]
    assert packed.meta["fill"] > 0.9 and max(packed[i]["segments"].max() for i in range(len(packed))) > 1


def test_meta_counts_bytes_and_characters(make_config, text_dir):
    text = "größer 🦙\n" * 100
    packed = prepare(make_config(corpus=text_dir({"a.txt": text})), "train")
    assert packed.meta["n_bytes"] == 1260 and packed.meta["n_characters"] == 810 and packed.meta["n_documents"] == 1
    assert packed.meta["n_tokens"] == 1260  # one document has no separator


def test_evaluation_batches_cover_the_split_in_order(make_config, text_dir):
    corpus = text_dir({"a.txt": "".join(f"{i:07d}\n" for i in range(2000))})
    config = make_config(corpus=corpus, sequence_length=16)
    packed, (tokens, _) = prepare(config, "validation"), stream_tokens(config, "validation")
    batches = list(evaluation_batches(packed, 4))
    assert len(packed) % 4 and all(batch["tokens"].shape == (4, 16) for batch in batches)
    predicted = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in batches])
    assert np.array_equal(predicted, tokens[1:])
    for rows in ([0, 1], [1, 3], [3]):
        for whole, part in zip(batches, evaluation_batches(packed, 4, rows=rows), strict=True):
            assert same({name: values[rows] for name, values in whole.items()}, part)


def test_evaluation_limit_spreads_over_the_split(make_config, text_dir):
    packed = prepare(make_config(corpus=text_dir({"a.txt": "".join(f"{i:07d}\n" for i in range(2000))})), "validation")
    (batch,) = evaluation_batches(packed, 5, limit=5)
    expected = [packed[i * len(packed) // 5]["tokens"] for i in range(5)]
    assert np.array_equal(batch["tokens"], expected) and batch["weights"].all()


def test_wikitext2_stream_is_byte_exact(make_config):
    directory = shared("wikitext2")
    config = make_config(corpus="wikitext2", manual_dir=str(directory), sequence_length=512)
    packed, text = prepare(config, "validation"), (directory / "wiki.valid.tokens").read_bytes()
    read = [packed[i] for i in range(len(packed))]
    targets = np.concatenate([row["targets"][row["weights"] > 0] for row in read])
    assert bytes([read[0]["tokens"][0]]) + targets.astype(np.uint8).tobytes() == text
    assert packed.meta["n_bytes"] == packed.meta["n_tokens"] == len(text)


def test_big_vocabulary_and_pieces_give_the_tokens_of_the_whole_text(make_config):
    directory = shared("wikitext2")
    config = make_config(
        corpus="wikitext2", manual_dir=str(directory), tokenizer=str(shared("tokenizers/gpt2_encoder.json"))
    )
    tokens, _ = stream_tokens(config, "validation")
    text = (directory / "wiki.valid.tokens").read_bytes()
    assert np.array_equal(tokens, tokenizer_for(config.data).encode(text)) and len(text) > 1 << 20


@pytest.mark.parametrize("end", ["</s>", "<s>"])
@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_every_document_starts_with_begin_of_text(make_config, tmp_path, packing, end):
    """Like a prompt of `generate`: Llama's <s> (1) comes first, after the </s> (2) of the previous document. If <s> ends a
    document, too, a stream has one between two documents."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(made.byte_fallback(post_processor=made.template("<s>", 1)))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"a{i}"}) + "\n" for i in range(40)))
    config = make_config(corpus=f"text_files:{lines}", tokenizer=str(tokenizer), packing=packing)
    tokens, documents = stream_tokens(config, "train")
    texts = np.split(tokens, np.flatnonzero(np.diff(documents)) + 1)
    last, begins = 2 if end == "</s>" else 1, len(texts) if packing == "documents" or end == "</s>" else 1
    assert len(texts) > 20 and sum(text[0] == 1 for text in texts) == begins and texts[0][0] == 1
    assert all(not {1, 2} & set(text[1:-1].tolist()) for text in texts)
    assert all(text[-1] == last for text in texts[:-1]) and (texts[-1][-1] == last) == (packing == "documents")
