"""Probes on models whose answer is known: one that has learnt nothing, and a stand-in that copies or recalls."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.contracts.variants import model
from tests.tiny_runs import tiny_config, tiny_model
from xfresearch import LanguageModel
from xfresearch.analysis.registry import ANALYSES, Analysis
from xfresearch.data.pipeline import evaluation_batches, prepare
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.models import transformer
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import NothingMeasured, UserError
from xfresearch.studies import probes

V = 50
MODEL = model({"vocab_size": V, "max_length": 32})


def stand_in(known) -> SimpleNamespace:
    """A model with a loss of 0 for tokens that `known`(tokens before, token) knows, and log V for others."""

    def loss(tokens_BL):
        return np.array([
            [0.0 if known(row[:at].tolist(), row[at]) else np.log(V) for at in range(1, len(row))] for row in tokens_BL
        ])

    config = SimpleNamespace(vocab_size=V, causal=True)
    return SimpleNamespace(loss=loss, config=config, run=SimpleNamespace(sequence_length=40))


def follows(before: list, token) -> bool:
    """Induction: the token followed the last occurrence of the token before it."""
    seen = [at for at in range(len(before) - 1) if before[at] == before[-1]]
    return bool(seen) and before[seen[-1] + 1] == token


def copies(before: list, token) -> bool:
    """The token of half a text ago."""
    return len(before) >= 20 and before[-20] == token


def test_a_model_that_copies_or_recalls_saves_all_of_the_second_half():
    assert probes.copying(stand_in(copies)) == pytest.approx(np.log(V))
    assert probes.recall(stand_in(follows)) == pytest.approx(np.log(V))
    assert probes.recall(stand_in(copies)) < 1.0  # the pairs have another order


@pytest.mark.parametrize("name", ["copying", "recall"])
def test_a_model_that_knows_nothing_saves_nothing(name):
    assert probes.measure(stand_in(lambda *_: False), [name]) == {name: 0.0}


def test_pairs_occur_twice_and_no_token_is_in_two_of_them():
    tokens_BL = probes.pairs_twice(np.random.default_rng(1), 5, 8, V)
    assert tokens_BL.shape == (5, 32)
    for row in tokens_BL:
        first, second = ({tuple(pair) for pair in half.reshape(8, 2)} for half in np.split(row, 2))
        assert first == second and len(set(row.tolist())) == 16
    assert (tokens_BL[:, :16] != tokens_BL[:, 16:]).any()


def test_probes_of_a_model_with_random_parameters():
    lm = LanguageModel(MODEL, transformer.init(MODEL, jax.random.key(0)), None, Config(sequence_length=32))
    result = probes.measure(lm, ("copying", "recall"))
    assert all(abs(value) < 0.2 for value in result.values())


def test_exact_match_is_the_share_of_pairs_without_a_wrong_token(monkeypatch):
    config = tiny_config("tasks/sort", evaluation__sequences=6, batch_size=4)
    lm = SimpleNamespace(run=config, config=config.model, params={}, tokenizer=ByteTokenizer())
    data = prepare(lm.run, lm.run.evaluation.split)
    batches = list(evaluation_batches(data, 4, 6))  # the second one has rows of padding
    pairs = sum(len({*row}) - (0 in row) for batch in batches for row in batch["segments"].tolist())
    assert pairs > 6  # several in a row

    def scorer(params, batch):
        wrong_BL = np.zeros(batch["targets"].shape, bool)
        if batch["tokens"].tolist() == batches[0]["tokens"].tolist():
            wrong_BL[0, :2] = wrong_BL[3, 0] = True  # two tokens of one pair, and one of another
        return np.zeros(wrong_BL.shape), (batch["weights"] > 0) & ~wrong_BL

    monkeypatch.setattr(probes, "_scorer", lambda model: scorer)
    assert probes.measure(lm, ["exact_match"]) == {"exact_match": (pairs - 2) / pairs}


def test_a_model_that_sorts_its_source_loses_all_with_the_source_of_another_row(monkeypatch):
    """A target whose number no source of the other row has is left out: without a source there is nothing to sort."""
    config = tiny_config("tasks/sort", evaluation__sequences=6, batch_size=4)
    lm = SimpleNamespace(run=config, config=config.model, params={}, tokenizer=ByteTokenizer())
    scored = []

    def sorts(params, batch):
        nll_BL = np.zeros(batch["targets"].shape, np.float32)
        for row, number in ((row, number) for row in range(4) for number in range(1, batch["segments"].max() + 1)):
            target = (batch["segments"][row] == number) & (batch["weights"][row] > 0)
            source = batch["source"][row][batch["source_segments"][row] == number]
            assert len(source) or not target.any()
            if target.any():
                nll_BL[row, target] = sorted(source[:-1]) != batch["targets"][row][target][:-1].tolist()
        scored.append(int((batch["weights"] > 0).sum()))
        return nll_BL, None

    monkeypatch.setattr(probes, "_scorer", lambda model: sorts)
    assert probes.measure(lm, ["source"]) == {"source": 1.0}
    whole = sum(int((batch["weights"] > 0).sum()) for batch in evaluation_batches(prepare(lm.run, "validation"), 4, 6))
    assert 0 < sum(scored[::2]) < whole  # some pairs have no other source


def test_figures_of_an_analysis_are_those_of_its_summary(monkeypatch):
    calls = []

    def run(lm):
        calls.append(lm)
        return SimpleNamespace(summary={"entropy": (0.5, 0.1), "mass on slots": (0.25, np.nan)})

    for applies, wanted in (("", [0.5, 0.25]), ("no attention", [np.nan, np.nan])):
        monkeypatch.setitem(ANALYSES, "attention", Analysis(run, lambda config, reason=applies: reason, ""))
        names = "attention.entropy", "attention.mass on slots"
        result = probes.measure(SimpleNamespace(config=MODEL), names)
        np.testing.assert_array_equal([result[name] for name in names], wanted)
    assert len(calls) == 1
    monkeypatch.setitem(ANALYSES, "attention", Analysis(run, lambda config: "", ""))
    result = probes.measure(SimpleNamespace(config=MODEL), ("attention.sink",))  # which a model without sinks does not have
    assert np.isnan(result["attention.sink"])


def test_a_figure_that_no_arm_has_is_refused_before_anything_is_trained(monkeypatch):
    def run(lm):
        if lm.knows == "nothing":
            raise NothingMeasured("none of the facts")
        return SimpleNamespace(summary={"entropy": (0.5, 0.1)} | ({"slots": (0.2, 0.1)} if lm.knows == "slots" else {}))

    monkeypatch.setitem(ANALYSES, "attention", Analysis(run, lambda config: "", ""))
    models = [SimpleNamespace(config=MODEL, knows=figures) for figures in ("slots", "no slots")]
    probes.check_figures(("copying", "tasks.x", "attention.slots", "attention.entropy"), models)
    message = "probes='attention.entropi' is not allowed: it must be attention. and one of .*; did you mean 'entropy'"
    with pytest.raises(UserError, match=message):
        probes.check_figures(("attention.entropi",), models)
    probes.check_figures(("attention.entropi",), [SimpleNamespace(config=MODEL, knows="nothing")])  # nothing can be said


def test_the_documented_figure_exists():
    lm = tiny_model("gpt2")
    probes.check_figures(("attention.Entropy", "attention.First token"), [lm])
    with pytest.raises(UserError, match="did you mean 'Entropy'"):
        probes.check_figures(("attention.entropy",), [lm])


def test_a_probe_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="probes='recal' is not allowed: it must be one of copying, recall, exact_match, "):
        probes.check(("recal",))
    with pytest.raises(UserError, match="probes='tasks.piqa,boolq' is not allowed: it must be tasks.NAME, of one task"):
        probes.check(("tasks.piqa,boolq",))
