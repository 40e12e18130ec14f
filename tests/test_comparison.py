"""The comparison of all variants: the list of variants, the output file, and no repeated training."""

import json
import math

import pytest

from configs.variants import VARIANTS
from docs import comparison
from xfresearch.errors import UserError

TINY = ["configs/gpt2.py:tiny", "configs/variants.py:tiny"]
OVERRIDES = ["--config.steps=2", "--config.optimizer.warmup=0", "--config.evaluation.final_sequences=8"]


def test_every_named_model_and_every_choice_is_compared():
    names = comparison.names()
    assert names[0] == comparison.BASELINE and len(names) == len(set(names))
    assert {"configs/lambda_lm.py:3m", "configs/variants.py:base", "configs/variants.py:alibi"} <= set(names)
    assert len(names) == len(VARIANTS) + 1 + sum(name.endswith(":3m") for name in names)


@pytest.mark.long
def test_a_variant_is_trained_again_only_if_its_config_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "names", lambda: TINY)
    monkeypatch.setattr(comparison, "BASELINE", TINY[0])
    monkeypatch.setattr(comparison, "ROUNDS", 1)
    output = tmp_path / "rows.json"
    rows = comparison.compare(2, OVERRIDES, str(output), only=["variants"])
    assert list(rows) == [TINY[1]]
    row = rows[TINY[1]]
    first, second = row["bits_per_byte"]
    assert first != second and all(0 < value < 12 for value in (first, second)) and row["relative_speed"] > 0
    written = json.loads(output.read_text())
    assert written["rows"] == rows and row["machine"]["cores"] > 0 and row["commit"]
    assert "variants.py:tiny" in comparison.table(rows)

    trained = []
    monkeypatch.setattr(comparison.Trial, "train", lambda self, seed: trained.append(self.config.steps) or math.nan)
    assert comparison.compare(2, OVERRIDES, str(output), only=["variants"]) == rows and not trained
    comparison.compare(2, ["--config.steps=1", *OVERRIDES[1:]], str(output), only=["variants"])
    assert trained == [1, 1]
    assert "nan" in comparison.table(json.loads(output.read_text())["rows"])  # the table shows that it diverged


def test_a_word_that_no_variant_has_is_an_error(tmp_path):
    command = ["--only", "alibi,nothing", "--json", str(tmp_path / "rows.json")]
    with pytest.raises(UserError, match="^--only=nothing is not allowed: it must be a part of one of .*variants.py:alibi"):
        comparison.main(command)
    assert not (tmp_path / "rows.json").exists()


def test_the_error_for_an_unknown_variant_suggests_the_nearest_name():
    from xfresearch.config.files import parse

    with pytest.raises(UserError, match="variants.py:alibbi: there is no variant 'alibbi'; did you mean 'alibi'"):
        parse(["--config", "configs/variants.py:alibbi"])
