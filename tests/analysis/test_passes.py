"""Rows of tokens that analyses measure: those that they cannot measure are refused in one line."""

import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from xfresearch import UserError
from xfresearch.analysis.registry import ANALYSES

OF_ROWS = [name for name in ANALYSES if name not in ("patching", "recall", "trace")]


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_that_cannot_be_measured_are_refused(name, tmp_path):
    (tmp_path / "notes.txt").write_text("a few lines of text\n" * 50)
    data = {"data__corpus": f"('text_files:{tmp_path}/notes.txt',)", "data__cache_dir": tmp_path / "cache"}
    lm = tiny_model("moe" if name == "routing" else "gpt2", **data)
    run = ANALYSES[name].run
    with pytest.raises(UserError, match="^rows of 1 token are not allowed: they must have at least 2 tokens$"):
        run(lm, data=[[5]])
    with pytest.raises(UserError, match="^sequence_length=1 is not allowed: it must be an integer of at least 2$"):
        run(lm, sequence_length=1)
    for count in (0, -1):
        with pytest.raises(UserError, match=f"^count={count} is not allowed: it must be an integer of at least 1$"):
            run(lm, count=count)


@pytest.mark.parametrize("name", ["attention", "lens", "memories", "norms", "routing"])
def test_two_tokens_are_enough(name):
    result = ANALYSES[name].run(tiny_model("moe" if name == "routing" else "gpt2"), [[5, 6]])
    assert np.isfinite([value for value, _ in result.summary.values()]).all()


def test_sublayers_of_a_layer_have_figures_of_their_own():
    """A block with two mixtures of experts has two rows for each layer, in the order of computation."""
    experts = {"kind": "moe", "hidden": 16}
    names = ("feed_forward_1", "feed_forward_2")
    changes = {f"model__blocks__main__{name}__{key}": value for name in names for key, value in experts.items()}
    lm = tiny_model("gpt2", model__blocks__main__layout="macaron", model__final_norm="none", **changes)
    tokens_NL = np.random.default_rng(0).integers(lm.config.vocab_size, size=(3, 6))
    result = ANALYSES["routing"].run(lm, tokens_NL)
    paths = [f"blocks.{layer}.{name}" for layer in range(lm.config.depth) for name in names]
    assert list(result.data["mixtures"]) == paths == [row[0] for row in result.tables[0].rows]
    taps = [f"{path}.router_probabilities" for path in paths]
    expected = [-(p * np.log(p)).sum(-1).mean() for p in map(np.asarray, lm.capture(tokens_NL, taps).values())]
    np.testing.assert_allclose(result.data["entropy"], expected, rtol=1e-5)
