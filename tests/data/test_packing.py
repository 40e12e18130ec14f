from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from xfresearch.data import packing
from xfresearch.data.packing import unpack

PAD = 65535
DTYPES = st.sampled_from([np.uint16, np.uint32])  # of the stored rows: a vocabulary of 2^16 or more has uint32
lengths_and_row = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 24))


def numbered(lengths):
    """A stream in which every token equals its index, and the offsets of its documents."""
    offsets = np.cumsum([0, *lengths])
    return np.arange(offsets[-1], dtype=np.uint16), offsets


def laid_out(rows, tokens, length, pad=PAD):
    """All rows [n, 2, L+1] of a stream of tokens."""

    def read(starts, lengths):
        pieces = zip(starts, lengths, strict=True)
        return np.concatenate([tokens[:0], *(tokens[start : start + size] for start, size in pieces)])

    return packing.lay_out(rows, np.arange(len(rows.firsts) - 1), read, length, pad)


def document_rows(tokens, offsets, length, pad=PAD):
    return laid_out(packing.document_rows(np.diff(offsets), length), tokens, length, pad)


def batch_of(rows, dtype=np.uint16):
    """The batch of rows that were packed with PAD, as rows of `dtype` with the largest value as padding."""
    rows_N2L = np.array(rows, np.int64)
    rows_N2L[:, 0][rows_N2L[:, 0] == PAD] = np.iinfo(dtype).max
    return unpack(rows_N2L.astype(dtype), np.iinfo(dtype).max)


@hypothesis_settings(deadline=None, max_examples=150)
@given(lengths_and_row, DTYPES)
def test_document_rows_predict_every_token_once_within_its_document(case, dtype):
    lengths, length = case
    tokens, offsets = numbered(lengths)
    rows = document_rows(tokens, offsets, length)
    firsts = set(offsets[:-1].tolist())
    predicted = Counter()
    if len(rows):
        batch = batch_of(rows, dtype)
        assert batch["tokens"].shape == (len(rows), length)
        weighted = batch["weights"] == 1
        predicted.update(batch["targets"][weighted].tolist())
        # A target is the next token of the same document.
        assert np.array_equal(batch["targets"][weighted], batch["tokens"][weighted] + 1)
        assert (batch["segments"][weighted] > 0).all()
        check_segments(batch, offsets)
    assert predicted == Counter({i: 1 for i in range(len(tokens)) if i not in firsts})


def check_segments(batch, offsets):
    document_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    for tokens, segments, positions in zip(batch["tokens"], batch["segments"], batch["positions"], strict=True):
        for segment in set(segments.tolist()) - {0}:
            at = np.flatnonzero(segments == segment)
            assert len(set(document_of[tokens[at]].tolist())) == 1
            assert np.array_equal(at, np.arange(at[0], at[-1] + 1))
            assert np.array_equal(positions[at], np.arange(len(at)))


@hypothesis_settings(deadline=None, max_examples=100)
@given(st.integers(2, 300), st.integers(2, 24), st.booleans(), DTYPES)
def test_stream_rows_predict_every_token_once(n, length, keep_last, dtype):
    rows = laid_out(packing.stream_rows(n, length, keep_last), np.arange(n, dtype=np.uint16), length)
    assert len(rows) == ((n - 1 + length - 1) // length if keep_last else (n - 1) // length)
    if not len(rows):
        return
    batch = batch_of(rows, dtype)
    weighted = batch["weights"] == 1
    expected = n if keep_last else len(rows) * length + 1
    assert batch["targets"][weighted].tolist() == list(range(1, expected))
    assert batch["tokens"][weighted].tolist() == list(range(expected - 1))
    real = batch["segments"] == 1
    assert np.array_equal(batch["positions"][real], np.tile(np.arange(length), (len(rows), 1))[real])
    assert (batch["tokens"][batch["segments"] == 0] == 0).all()


def test_document_rows_of_a_small_example():
    tokens, offsets = numbered([3, 2, 9])
    rows = document_rows(tokens, offsets, 6)
    assert [row[0].tolist() for row in rows] == [
        [5, 6, 7, 8, 9, 10, 11],
        [0, 1, 2, 3, 4, PAD, PAD],
        [11, 12, 13, *[PAD] * 4],
    ]
    batch = batch_of(rows)
    assert batch["segments"].tolist() == [[1] * 6, [1, 1, 1, 2, 2, 0], [1, 1, 1, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 1, 2]]
    assert batch["weights"].tolist() == [[1] * 6, [1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_many_documents_fill_the_rows():
    lengths = np.random.default_rng(0).integers(2, 200, 2000)
    rows = list(document_rows(*numbered_wide(lengths), 128, 2**32 - 1))
    assert np.mean([np.count_nonzero(row[1]) / 129 for row in rows]) > 0.97


def numbered_wide(lengths):
    offsets = np.cumsum([0, *lengths])
    return np.arange(offsets[-1], dtype=np.uint32), offsets
