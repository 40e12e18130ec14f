"""The metric of a model that knows frequencies alone."""

import math

import pytest

from xfresearch.data.tokenizers import vocab_size
from xfresearch.run_config.config_files import parse
from xfresearch.run_config.resolving import with_vocabulary
from xfresearch.studies.measurement import of_frequencies


def test_frequencies_are_those_of_tokens_and_of_labels(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_bytes(b"aaab" * 1024)
    text = parse(["--config", "configs/variants.py:tiny", f"--config.data.corpus=('text_files:{tmp_path}',)"])
    result = of_frequencies(with_vocabulary(text, vocab_size(text.data)))
    entropy = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert result["bits_per_byte"] == pytest.approx(entropy, abs=0.01)
    assert result["accuracy"] == pytest.approx(0.75, abs=0.01)
    labels = parse(["--config", "configs/brody_majority.py:tiny"])
    assert 0.04 < of_frequencies(labels)["accuracy"] < 0.25  # 8 classes


def test_corpora_count_by_their_shares_of_the_sequences(tmp_path):
    for name, copies in (("a", 40), ("b", 10)):
        for number in range(copies):
            (tmp_path / f"{name}{number}.txt").write_bytes(name.encode() * 4096)
    corpora = tuple(f"text_files:{tmp_path}/{name}*.txt" for name in "ab")
    given = ["--config", "configs/variants.py:tiny", f"--config.data.corpus={corpora!r}"]
    for weights, bits in (((), 1.0), ((0.25, 0.75), 2.0)):  # of the letter a, which is all of the held-out text
        config = parse([*given, f"--config.data.weights={weights!r}"])
        result = of_frequencies(with_vocabulary(config, vocab_size(config.data)))
        assert result["bits_per_byte"] == pytest.approx(bits, abs=0.05)
