"""Compression baselines against slow, direct reference implementations, on real text."""

import lzma
import math
import shutil
import subprocess
import tracemalloc
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.tolerances import TOLERANCE, relative_error
from xfresearch.data import baselines
from xfresearch.data.baselines import (
    ByteTrigram,
    compression_baselines,
    trigram,
    trigram_counts,
    unigram_entropy,
    xz,
)
from xfresearch.runtime.errors import UserError


@pytest.fixture(scope="module")
def split():
    """Train and held-out documents: modules of the standard library, which every machine has."""
    documents = [path.read_bytes()[:6000] for path in sorted(Path(lzma.__file__).parent.glob("*.py"))[:12]]
    return documents[:8], [*documents[8:], b"", "naïve \0 été\n".encode()]


def reference_trigram(train, heldout):
    """The equation of ByteTrigram with dictionaries, one byte at a time."""
    counts = defaultdict(Counter)
    for document in train:
        padded = b"\0\0" + document
        for i in range(2, len(padded)):
            for order in range(3):
                counts[padded[i - order : i]][padded[i]] += 1

    def probability(context, byte):
        shorter = probability(context[1:], byte) if context else 1 / 256
        seen = counts.get(context)
        return (seen[byte] + len(seen) * shorter) / (seen.total() + len(seen)) if seen else shorter

    bits = size = 0
    for document in heldout:
        padded = b"\0\0" + document
        for i in range(2, len(padded)):
            bits -= math.log2(probability(padded[i - 2 : i], padded[i]))
            size += 1
    return bits / size


def test_trigram_matches_the_reference(split):
    assert relative_error(trigram(*split), reference_trigram(*split)) < TOLERANCE["float64"]


def test_trigram_probabilities_sum_to_one(split):
    model = ByteTrigram(split[0])
    first, second = np.random.default_rng(0).integers(0, 256, (2, 500))
    first[:200], second[:200] = ord("e"), np.arange(200)
    sums = model.probability(first[:, None], second[:, None], np.arange(256)[None] + 0 * first[:, None]).sum(1)
    assert relative_error(sums, np.ones(500)) < TOLERANCE["float64"]


def test_unigram_entropy_matches_its_definition(split):
    train, heldout = b"".join(split[0]), b"".join(split[1])
    expected = -sum(math.log2((train.count(byte) + 1) / (len(train) + 256)) for byte in heldout) / len(heldout)
    assert relative_error(unigram_entropy(*split), expected) < TOLERANCE["float64"]


@pytest.mark.skipif(not shutil.which("xz"), reason="no xz program on this machine")
def test_xz_matches_the_xz_program(split):
    # The text repeats after 9 MiB, which only the dictionary of -9 reaches back over.
    documents = [*split[1], bytes(9 << 20), *split[1]]
    text = b"".join(documents)
    program = subprocess.run(["xz", "-9", "--check=crc64", "-T1"], input=text, capture_output=True, check=True).stdout
    assert xz(documents) == 8 * len(program) / len(text)


def test_baselines_are_ordered_and_repeatable(split):
    first = compression_baselines(*split)
    second = compression_baselines(*split)
    assert first == second and list(first) == ["unigram entropy", "byte trigram", "xz -9"]
    assert 8 > first["unigram entropy"] > first["byte trigram"] > 1


def test_unseen_bytes_have_a_finite_cost():
    assert math.isfinite(trigram([b"aaa"], [bytes(range(256))])) and trigram([], [b"ab"]) == 8.0


def test_counts_of_a_long_document_equal_those_of_its_pieces(monkeypatch):
    """Counting goes by chunks; the context of a chunk's first bytes is the end of the chunk before it."""
    text = np.random.default_rng(0).integers(0, 4, 1000, np.uint8).tobytes()
    whole = trigram_counts([text, b"", text[:7]])
    monkeypatch.setattr(baselines, "CHUNK", 13)
    np.testing.assert_array_equal(trigram_counts([text, b"", text[:7]]), whole)
    assert whole.sum() == 1007 and whole[0] == len([i for i in range(1000) if (b"\0\0" + text)[i : i + 3] == bytes(3)])


def test_memory_does_not_grow_with_the_text():
    """Beyond the text itself: the tables, 128 MiB each, and one chunk."""

    def peak(size: int) -> int:
        text = np.random.default_rng(0).integers(32, 40, size, np.uint8).tobytes()
        tracemalloc.start()
        trigram([b"some text"], [text])
        _, result = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return result

    assert peak(16 << 20) - peak(1 << 20) < 1.1 * (15 << 20)  # the padded copy of the document


def test_an_empty_held_out_split_is_an_error():
    with pytest.raises(UserError, match="the held-out split has no bytes"):
        compression_baselines([b"text"], [b"", b""])


def test_baselines_of_wikitext2_are_plausible():
    folder = Path(__file__).parents[3] / "shared/data/wikitext2"
    if not folder.exists():
        pytest.skip("WikiText-2 is not in ../shared/data")
    train, heldout = (folder / f"wiki.{name}.tokens" for name in ("train", "valid"))
    values = compression_baselines([train.read_bytes()], [heldout.read_bytes()])
    assert 4.4 < values["unigram entropy"] < 4.8 and 2.6 < values["byte trigram"] < 3.2 and 2 < values["xz -9"] < 3
