"""Memories: the largest coefficients as a full sort has them, the figures of Geva et al., and a planted memory."""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contracts.variants import model
from tests.tiny_runs import tiny_config, tiny_model
from xfresearch import LanguageModel, analysis
from xfresearch.analysis.coefficients import of_keys, sites
from xfresearch.analysis.memories import occurrences, patterns
from xfresearch.analysis.sequences import Sequences
from xfresearch.analysis.triggers import empty, update
from xfresearch.models import transformer

TOKENS_NL = np.random.default_rng(0).integers(257, size=(11, 16))


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_largest_coefficients_are_those_of_a_full_sort(batch):
    m_TK = np.random.default_rng(1).integers(-9, 9, size=(64, 5)).astype(np.float32)  # with ties: the earlier stays
    m_TK[:, 0] = 0
    m_TK[::3, 0] = -0.0  # is equal to 0.0
    state = empty(5, 12)
    for first in range(0, 64, batch):
        state = update(state, jnp.asarray(m_TK[first : first + batch]), first)
    order_TK = np.argsort(-m_TK, axis=0, kind="stable")[:12]
    np.testing.assert_array_equal(state["at"], order_TK.T)
    np.testing.assert_array_equal(state["values"], np.take_along_axis(m_TK, order_TK, 0).T)


def test_fewer_tokens_than_triggers_leave_places_empty():
    state = update(empty(2, 4), jnp.array([[1.0, 2.0], [3.0, -1.0]]), 10)
    np.testing.assert_array_equal(state["at"], [[11, 10, -1, -1], [10, 11, -1, -1]])


def planted(seed: int | None = None) -> LanguageModel:
    """One block whose attention writes zeros. Key i of 24 is the embedding of token i, and its value is that of token i + 1.
    With a seed, all parameters are random."""
    V = 24
    changes = {"norm": "none", "feed_forward.kind": "relu", "feed_forward.hidden": V}
    config = model(
        {"width": 32, "depth": 1, "vocab_size": V, "final_norm": "none"}
        | {f"blocks.main.{name}": value for name, value in changes.items()}
    )
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda leaf: np.asarray(rng.standard_normal(leaf.shape)), transformer.abstract(config))
    if seed is None:
        params = jax.tree.map(np.zeros_like, params)
        params["embed"]["table"][:] = np.eye(V, 32)
        block = params["blocks"]["main"]["feed_forward"]
        block["up"]["kernel"][0] = np.eye(32, V)
        block["down"]["kernel"][0] = 5 * np.eye(V, 32)[(np.arange(V) + 1) % V]
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    return LanguageModel(config, params, None, tiny_config("gpt2"))


@pytest.mark.parametrize("layout", ["deep_norm", "no_skip", "skipless"])
def test_without_a_plain_sum_there_are_no_figures_of_the_stream(layout):
    lm = tiny_model("llama", model__blocks__main__layout=layout, model__final_norm="none")
    data = analysis.memories(lm, TOKENS_NL, top=4).data
    assert np.isnan([data[name] for name in ("residual", "written", "both", "third", "changes")]).all()
    assert not np.isnan([data["active"], data["composed"]]).any()


def test_slots_whose_heads_the_next_sublayer_reads_are_left_out():
    changes = {"layout": "fused_output", "attention__memory_slots": 3}
    lm = tiny_model("llama", **{f"model__blocks__main__{name}": value for name, value in changes.items()})
    data = analysis.memories(lm, TOKENS_NL, top=4).data
    assert list(data["memories"]) == ["blocks.0.feed_forward", "blocks.1.feed_forward"]


def test_an_expert_without_room_has_coefficients_of_zero():
    lm, memory = tiny_model("moe", model__blocks__main__feed_forward__moe__capacity=0.25), "blocks.0.feed_forward"
    values = lm.capture(TOKENS_NL, sites(lm.config, memory))
    plain, gated = (np.asarray(of_keys(lm.config, memory, values, gated)) for gated in (False, True))
    assert np.asarray(values[f"{memory}.dropped"]).any()
    np.testing.assert_array_equal(plain != 0, gated != 0)


def test_a_planted_memory_is_found_and_a_random_one_is_not():
    start_N = np.random.default_rng(2).integers(24, size=(20, 1))
    counting_NL = (start_N + np.arange(18)) % 24  # token i is always followed by i + 1
    data = analysis.memories(planted(), counting_NL, top=10).data
    last = counting_NL.reshape(-1)[data["blocks.0.feed_forward/triggers"]]
    np.testing.assert_array_equal(last, np.broadcast_to(np.arange(24)[:, None], last.shape))
    np.testing.assert_array_equal(data["blocks.0.feed_forward/value_tokens"][:, 0], (np.arange(24) + 1) % 24)
    assert data["shared"][0] == 1.0 and data["agreement"][0] == 1.0 and data["agreement_random"][0] < 0.2
    assert data["active"][0] == pytest.approx(1 / 24) and data["composed"][0] == 0.0 and data["written"][0] == 1.0
    without = analysis.memories(planted(seed=3), np.random.default_rng(4).integers(24, size=(20, 18)), top=10).data
    assert without["agreement"][0] < 0.3


@pytest.mark.parametrize("dead", [12, 24])
def test_keys_that_no_token_activates_have_no_triggers(dead):
    """The first keys of the planted memory are never active: the other ones have the figures of the whole memory."""
    start_N = np.random.default_rng(2).integers(24, size=(20, 1))
    counting_NL = (start_N + np.arange(18)) % 24
    lm = planted()
    up = lm.params["blocks"]["main"]["feed_forward"]["up"]
    up["kernel"] = up["kernel"].at[:, :, :dead].set(0)
    result = analysis.memories(lm, counting_NL, top=10)
    at_KT, memory = result.data["blocks.0.feed_forward/triggers"], "blocks.0.feed_forward"
    assert (at_KT[:dead] == -1).all() and (at_KT[dead:, 0] >= 0).all()
    expected = 1.0 if dead < 24 else np.nan
    np.testing.assert_array_equal([result.data[name][0] for name in ("shared", "agreement")], expected)
    named = [row[0] for table in result.tables if table.title == f"Keys of {memory}" for row in table.rows]
    assert sorted(map(int, named)) == list(range(dead, 24))
    assert result.files[f"{memory}.html"].count(b"<section") == 24 - dead


def test_patterns_count_shared_ends():
    tokens_NL = np.array([[1, 2, 3, 9, 2, 3, 5, 2, 3, 7, 7, 7]])
    at_KT = np.array([[2, 5, 8, 0], [9, 10, 11, -1], [0, 3, 6, 11]])  # ends 3 3 3 1 | 7 7 7 | 1 9 5 7
    result = patterns(tiny_model("gpt2", data__tokenizer="bytes"), Sequences(tokens_NL), at_KT, np.array([9, 7, 2]))
    assert result["shared"] == pytest.approx(6 / 11) and result["agreement"] == 1.0
    assert result["shared_2"] == pytest.approx(3 / 11)  # 2 3 three times; 7 follows 3, 7, 7
    np.testing.assert_array_equal(occurrences(np.array([[1, 2, 1], [4, 4, 4]])), [[2, 1, 2], [3, 3, 3]])


def test_patterns_count_shared_words():
    text = b"the cat sat. a cat, the Cat! no dog here"
    ends = [text.index(end) + len(end) - 1 for end in (b"the cat", b"a cat,", b"the Cat!", b"dog")]
    result = patterns(tiny_model("gpt2"), Sequences(np.array([list(text)])), np.array([ends]), np.array([0]))
    assert result["shared_word"] == 3 / 4 and result["shared"] == 0


def test_an_interrupted_call_goes_on_from_its_state(tmp_path, monkeypatch):
    module = import_module("xfresearch.analysis.memories")
    monkeypatch.setattr(module, "BATCH", 4)
    monkeypatch.setattr("xfresearch.analysis.unfinished.EVERY", 0.0)
    pass_of, passes = module._values, []

    def interrupted(*arguments):
        passes.append(arguments)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return pass_of(*arguments)

    monkeypatch.setattr(module, "_values", interrupted)
    lm, file = tiny_model("gpt2"), tmp_path / "state.npz"
    with pytest.raises(KeyboardInterrupt):
        analysis.memories(lm, TOKENS_NL, top=3, resume=file)
    again = analysis.memories(lm, TOKENS_NL, top=3, resume=file)
    assert len(passes) == 4  # the first two of three batches are not computed again
    whole = analysis.memories(lm, TOKENS_NL, top=3)
    for name, value in whole.data.items():
        np.testing.assert_array_equal(again.data[name], value, err_msg=name)
    other = LanguageModel(lm.config, jax.tree.map(lambda x: 1.1 * x, lm.params), lm.tokenizer, lm.run)
    passes.clear()
    passes += [None] * 3
    analysis.memories(other, TOKENS_NL, top=3, resume=file)  # the state of another model is not used
    assert len(passes) == 3 + 3


def test_every_memory_has_a_page_of_its_keys(tmp_path):
    tokens_NL = np.array([list(b"see <b>me</b> & you")])
    result = analysis.memories(tiny_model("moe"), tokens_NL, top=3)
    result.save(tmp_path)
    for number, memory in enumerate(result.data["memories"]):
        page = (tmp_path / f"{memory}.html").read_text()
        assert page.count("<section") == (result.data[f"{memory}/triggers"][:, 0] >= 0).sum() > 0
        assert "<b>" not in page and "<mark>" in page
        assert f'href="{memory}.html"' in (tmp_path / "report.html").read_text(), number


def test_the_page_has_no_markup_of_the_corpus(tmp_path):
    lm = tiny_model("gpt2")
    analysis.memories(lm, np.array([list(b"<b>&amp;</b> <i>x</i>")]), top=3).report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<b>" not in page and "&lt;b&gt;" in page
