"""A network whose memories are known: an edit changes exactly one answer, whatever the method writes it with."""

import dataclasses
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.editing.words import OBJECT_OF, OBJECTS, SUBJECTS, WORDS, knowing
from xfresearch import UserError, editing
from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.editing.optimise import Settings
from xfresearch.editing.requests import memories_up_to

MEMORY = "blocks.0.feed_forward"
REQUEST = Record("Bea", "{}", "blue", "green", paraphrases=(" Bea",), neighbours=(("Cid", "blue"),))


@pytest.fixture(autouse=True)
def without_prefixes(monkeypatch):
    """The network's own texts are not words."""
    for name in ("rome", "memit"):
        monkeypatch.setattr(import_module(f"xfresearch.editing.{name}"), "prefixes_of", lambda lm, seed: [""])


@pytest.fixture
def lm(tmp_path):
    (tmp_path / "names.txt").write_text("\n".join(SUBJECTS * 200))
    result = knowing()
    corpus = (f"text_files:{tmp_path}/names.txt",)
    data = dataclasses.replace(result.run.data, corpus=corpus, cache_dir=str(tmp_path / "cache"))
    evaluation = dataclasses.replace(result.run.evaluation, split="train")
    result.run = dataclasses.replace(result.run, data=data, evaluation=evaluation, sequence_length=16)
    return result


def answers(lm) -> list[str]:
    return [WORDS[int(lm(subject)[0, -1].argmax())] for subject in SUBJECTS]


METHODS = {
    "rome": lambda lm: editing.rome(lm, [REQUEST], MEMORY, tokens=400),
    "memit": lambda lm: editing.memit(lm, [REQUEST], [MEMORY], tokens=400, settings=Settings(largest=4.0)),
    "finetune": lambda lm: editing.finetune(lm, [REQUEST], MEMORY, rate=1.0, steps=40),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_edit_changes_exactly_one_answer(name, lm):
    before = [OBJECTS[number] for number in OBJECT_OF]
    assert answers(lm) == before == [" red", " blue", " blue", " red"]
    edited, report = METHODS[name](lm)
    assert answers(edited) == [" red", " green", " blue", " red"]
    down, changed = (np.asarray(each.params["blocks"]["main"]["feed_forward"]["down"]["kernel"][0]) for each in (lm, edited))
    np.testing.assert_array_equal(down[[0, 2, 3]], changed[[0, 2, 3]])  # only the unit of Bea
    metrics = {key: row[1] for key, row in report.summary().items()}
    assert metrics["S"] == metrics["efficacy, generated"] == metrics["paraphrase, score"] == 1.0
    assert metrics["neighbourhood, teacher forced"] == 1.0 and not report.failures
    assert report.before.values["efficacy, score"][0] == 0.0
    assert report.drift_after.bits_per_byte > report.drift_before.bits_per_byte - 1  # a number


@pytest.mark.parametrize("name", METHODS)
def test_the_object_before_may_be_missing(name, lm, monkeypatch):
    monkeypatch.setattr("tests.editing.test_planted.REQUEST", REQUEST._replace(target=""))
    edited, report = METHODS[name](lm)
    assert answers(edited) == [" red", " green", " blue", " red"] and not report.failures
    assert np.isnan(report.after.old[0]) and report.after.values["efficacy, generated"][0] == 1.0


@pytest.mark.parametrize("memory", ["blocks.0.attention", "feed_forward", "blocks.9.feed_forward", "blocks.0.feedforward"])
@pytest.mark.parametrize("name", METHODS)
def test_a_memory_that_is_not_there_is_one_line(name, memory, lm, monkeypatch):
    monkeypatch.setattr("tests.editing.test_planted.MEMORY", memory)
    with pytest.raises(UserError, match=f"^there is no memory '{memory}'.*\\(allowed: blocks.0.feed_forward\\)$"):
        METHODS[name](lm)


def test_without_objects_before_there_is_nothing_to_trace(lm):
    """It is an error: the facts of the model's own corpus are others."""
    request = REQUEST._replace(target="")
    with pytest.raises(UserError, match="no request has a target, the object before.*: give --memory"):
        editing.rome(lm, [request], tokens=400)


def test_a_bound_that_is_too_small_is_a_failure(lm):
    edited, report = editing.constrained_finetune(lm, [REQUEST], MEMORY, largest=0.5, rate=1.0)
    assert answers(edited)[1] == " blue"
    assert report.failures == ["request 0, 'Bea': 'blue' is still more likely than 'green'"]
    down, changed = (np.asarray(each.params["blocks"]["main"]["feed_forward"]["down"]["kernel"]) for each in (lm, edited))
    assert np.abs(changed - down).max() == pytest.approx(0.5)
    strong, report = editing.constrained_finetune(lm, [REQUEST], MEMORY, largest=20.0, rate=1.0)
    assert answers(strong)[1] == " green" and not report.failures


def test_several_edits_at_once_and_one_after_another(lm):
    requests = [REQUEST, Record("Cid", "{}", "blue", "red"), Record("Dov", "{}", "red", "blue")]
    wanted = [" red", " green", " red", " blue"]
    assert answers(editing.rome(lm, requests, MEMORY, tokens=400)[0]) == wanted
    settings = {"tokens": 400, "weight": 0.01, "settings": Settings(largest=4.0)}
    edited, report = editing.memit(lm, requests, [MEMORY], **settings)
    assert answers(edited) == wanted and len(report.edits) == 3
    known = [Fact("Bea", "colour", "blue", ("Bea",), ()), Fact("Ada", "colour", "red", ("Ada",), ())]
    requests = [record._replace(relation="colour") for record in requests]
    report = editing.rome(lm, requests, MEMORY, tokens=400, known=known, alone=True)[1]
    assert len(report.edits) == len(report.after.new) == 3 and report.after.values["efficacy, score"].min() == 1.0
    assert report.before.values["efficacy, score"].max() == 0.0 and answers(lm)[1] == " blue"


@pytest.mark.parametrize("layer", [pytest.param(0, marks=pytest.mark.long), 1])
def test_the_trace_chooses_the_layer_that_has_the_memory(lm, layer):
    both = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), lm.params["blocks"])
    down = both["main"]["feed_forward"]["down"]
    down["kernel"] = down["kernel"].at[1 - layer].set(0.0)
    lm.config, lm.params = dataclasses.replace(lm.config, depth=2), lm.params | {"blocks": both}
    pairs = zip(SUBJECTS, OBJECT_OF, strict=True)
    requests = [Record(name, "{}", OBJECTS[number].strip(), "green") for name, number in pairs]
    assert editing.traced(lm, requests) == f"blocks.{layer}.feed_forward"
    edited, report = editing.rome(lm, requests[1:2], tokens=400)
    assert report.edits[0].memories == (f"blocks.{layer}.feed_forward",) and answers(edited)[1] == " green"


def test_memit_edits_three_layers_that_end_at_a_memory_or_the_first_three(lm):
    lm.config = dataclasses.replace(lm.config, depth=5)
    for last, expected in ((0, "012"), (1, "012"), (4, "234")):
        assert memories_up_to(lm, f"blocks.{last}.feed_forward", 3) == tuple(f"blocks.{n}.feed_forward" for n in expected)
    assert memories_up_to(lm, "blocks.1.feed_forward", 9) == tuple(f"blocks.{n}.feed_forward" for n in range(5))


def test_memit_shares_what_is_missing_among_the_layers():
    """The paper's formula for one matrix: (a C + K^T K)^-1 K^T R; and the same from the general form."""
    from xfresearch.editing.values import Values, memit_change

    rng = np.random.default_rng(0)
    N, M, D = 3, 5, 4
    keys_NM, asked_ND, half_MM = rng.standard_normal((N, M)), rng.standard_normal((N, D)), rng.standard_normal((M, 9))
    C_MM = half_MM @ half_MM.T
    result = memit_change(Values((), 1.0, np.zeros((1, M, D)), None), C_MM[None], keys_NM[:, None], asked_ND, 0.3)
    expected = np.linalg.inv(0.3 * C_MM + keys_NM.T @ keys_NM) @ keys_NM.T @ asked_ND
    np.testing.assert_allclose(result[0], expected)
    one_head = Values((), 1.0, np.zeros((1, M, D)), np.eye(D)[None])  # W_O is the identity
    general = memit_change(one_head, C_MM[None], keys_NM[:, None], asked_ND, 0.3)
    np.testing.assert_allclose(general[0], expected, rtol=1e-5, atol=1e-7)


def test_the_share_of_each_layer(lm, monkeypatch):
    """The keys of the first of two layers write a half of what the stream lacks, those of the second one all of the rest."""
    module, asked = import_module("xfresearch.editing.memit"), []
    solve = module.memit_change

    def recorded(values, C, keys_NHM, asked_ND, weight):
        asked.append(asked_ND)
        return solve(values, C, keys_NHM, asked_ND, weight)

    monkeypatch.setattr(module, "memit_change", recorded)
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), lm.params["blocks"])
    lm.config, lm.params = dataclasses.replace(lm.config, depth=2), lm.params | {"blocks": twice}
    memories = ["blocks.0.feed_forward", "blocks.1.feed_forward"]
    edited, _ = editing.memit(lm, [REQUEST], memories, tokens=400, weight=1e-6, ridge=1e-9, settings=Settings(largest=0.5))
    before, after = (module.streams(each, memories[1], "residual", [REQUEST]) for each in (lm, edited))
    np.testing.assert_allclose(after - before, 2 * asked[0], rtol=1e-3, atol=1e-3)
    assert len(asked) == 2


def test_memit_of_slots_is_the_minimum_of_its_objective():
    """A small step in any direction is worse, with two groups of two heads."""
    from xfresearch.editing.values import Values, memit_change, written

    rng = np.random.default_rng(3)
    N, H, M, V, D = 3, 4, 5, 2, 3
    values = Values((), 1.0, np.zeros((2, M, V)), rng.standard_normal((H, V, D)))
    keys_NHM, asked_ND = rng.standard_normal((N, H, M)), rng.standard_normal((N, D))
    halves = rng.standard_normal((2, M, 7))
    C_GMM = halves @ halves.swapaxes(1, 2)

    def objective(change):
        lacks = np.stack([written(values, change, key_HM) for key_HM in keys_NHM]) - asked_ND
        return 0.2 * np.einsum("gmv,gmn,gnv->", change, C_GMM, change) + (lacks**2).sum()

    result = memit_change(values, C_GMM, keys_NHM, asked_ND, 0.2)
    slope = [objective(result + step) - objective(result - step) for step in 1e-4 * rng.standard_normal((50, 2, M, V))]
    assert np.abs(slope).max() < 1e-9 and objective(result) < 0.7 * objective(0 * result)


def test_memit_requests_about_one_subject_share_a_vector(lm, monkeypatch):
    module, groups = import_module("xfresearch.editing.memit"), []

    def recorded(lm, memory, records, *rest):
        groups.append([record.target_new for record in records])
        return find(lm, memory, records, *rest)

    find = module.delta_for
    monkeypatch.setattr(module, "delta_for", recorded)
    requests = [REQUEST, Record("Cid", "{}", "blue", "red"), REQUEST._replace(prompt="Cid {}", target_new="red")]
    report = editing.memit(lm, requests, [MEMORY], tokens=400)[1]
    assert groups == [["green", "red"], ["red"]]
    assert [edit.record for edit in report.edits] == requests
    assert report.edits[0].losses == report.edits[2].losses != report.edits[1].losses


@pytest.mark.parametrize("key", ["each", "mean"])
def test_memit_writes_for_the_key_after_each_prefix_or_for_their_mean(key):
    from xfresearch.editing.memit import change_for
    from xfresearch.editing.values import Values

    rng = np.random.default_rng(4)
    N, J, M, D = 3, 4, 6, 2
    keys_NJM, asked_ND, half_MM = rng.standard_normal((N, J, M)), rng.standard_normal((N, D)), rng.standard_normal((M, 9))
    C_MM = half_MM @ half_MM.T
    values = Values((), 1.0, np.zeros((1, M, D)), None)
    result = change_for(values, C_MM[None], keys_NJM[:, :, None], asked_ND, key, 0.3)
    mean_NM = keys_NJM.mean(1)
    K_MM = np.einsum("njm,njk->mk", keys_NJM, keys_NJM) / J if key == "each" else mean_NM.T @ mean_NM
    np.testing.assert_allclose(result[0], np.linalg.inv(0.3 * M * C_MM + K_MM) @ mean_NM.T @ asked_ND, rtol=1e-9)


def test_what_memit_cannot_edit(lm):
    from tests.contracts.variants import model
    from tests.tiny_runs import tiny_config
    from xfresearch import LanguageModel
    from xfresearch.editing.memit import stream_site
    from xfresearch.models import transformer

    def made(layout):
        config = model({"blocks.main.layout": layout, "final_norm": "none"})
        return LanguageModel(config, transformer.init(config, jax.random.key(0)), None, tiny_config("gpt2"))

    assert stream_site(made("pre_norm"), MEMORY) == "residual" and stream_site(made("post_norm"), MEMORY) == "sum"
    with pytest.raises(UserError, match="memit is not allowed with blocks.0.feed_forward: what it writes is not added"):
        stream_site(made("peri_norm"), MEMORY)
    with pytest.raises(UserError, match="key='published' is not allowed: it must be one of each, mean"):
        editing.memit(lm, [REQUEST], [MEMORY], key="published")
