"""ROME: its parts equal their definitions, an edit is what the model then says, and failures are reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny_runs import tiny_model
from tests.tolerances import TOLERANCE, relative_error
from xfresearch import LanguageModel, Patch, UserError
from xfresearch.analysis import unfinished
from xfresearch.analysis.sequences import Sequences
from xfresearch.data.cache import cache_root
from xfresearch.data.records import Record
from xfresearch.editing import keys
from xfresearch.editing.keys import covariance, keys_of, prefixes_of
from xfresearch.editing.optimise import PUBLISHED, Settings, delta_for
from xfresearch.editing.report import Asked, Edit, of
from xfresearch.editing.rome import rome
from xfresearch.models import transformer

REQUEST = Record("Ada", "{} plays", "a", "b")
PREFIXES = ["", "xy. ", "long one. "]
LAST = Record("Ada", "plays {}", "a", "b")  # the prompt ends with its subject, so the last layer's memory decides
STRONG = PUBLISHED._replace(steps=60, largest=50.0)  # the parameters are random
MEMORIES = [("gpt2", "blocks.1.feed_forward"), ("moe", "blocks.1.feed_forward"), ("all_attention", "blocks.1.attention")]


@pytest.fixture(scope="module")
def keeps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "notes.txt").write_text("".join(f"line {n} of the text, and {n * n} more\n" for n in range(600)))
    keys_of_config = {"data__corpus": f"('text_files:{folder}/notes.txt',)", "data__cache_dir": folder / "cache"}
    return keys_of_config | {"evaluation__split": "train"}


def test_keys_are_those_at_the_last_token_of_the_subject(keeps):
    lm = tiny_model("gpt2", **keeps)
    result = keys_of(lm, "blocks.1.feed_forward", REQUEST, PREFIXES)
    tap = "blocks.1.feed_forward.coefficients"
    for prefix, key_HM in zip(PREFIXES, result, strict=True):
        m_BLF = lm.capture(f"{prefix}Ada plays", tap)[tap]
        last = m_BLF.shape[1] - len(" plays") - 1
        assert relative_error(key_HM[0], m_BLF[0, last]) < 10 * TOLERANCE["float32"]


def test_prefixes_are_the_models_own_text(keeps):
    result = prefixes_of(tiny_model("gpt2", **keeps))
    assert len(result) == 21 and result[0] == "" and all(text.endswith(". ") for text in result[1:])


@pytest.mark.parametrize("name, memory", MEMORIES)
def test_the_covariance_is_the_mean_product_of_coefficients_and_is_kept(name, memory, keeps, monkeypatch):
    lm = tiny_model(name, **keeps)
    length = lm.run.sequence_length
    tokens_NL = np.concatenate(list(lm.batches(split="train", limit=10)))
    expected = 0.0
    for tokens_L in tokens_NL:
        m_LK = np.asarray(keys.coefficients(lm.config, memory, lm.params, Sequences(tokens_L[None]))[0], np.float64)
        m_LHM = m_LK.reshape(length, -1, 32 if name == "all_attention" else m_LK.shape[-1])
        expected = expected + np.einsum("lhm,lhn->hmn", m_LHM, m_LHM)
    result = covariance(lm, memory, tokens=10 * length)
    assert relative_error(result, expected / tokens_NL.size) < 30 * TOLERANCE["float32"]
    monkeypatch.setattr(keys, "_moments", None)  # not called again
    assert (covariance(lm, memory, tokens=10 * length) == result).all()


def test_the_covariance_of_a_bfloat16_model_is_not_summed_in_bfloat16(keeps):
    """The coefficients are in bfloat16, their products and sums are not. A file from when they were is not read."""
    lm = tiny_model("gpt2", **keeps, model__dtype="bfloat16")
    memory, tokens = "blocks.1.feed_forward", 24 * lm.run.sequence_length
    batches = list(lm.batches(split="train", batch_size=keys.BATCH, limit=24))
    m_BLM = [np.asarray(keys.coefficients(lm.config, memory, lm.params, Sequences(tokens_BL))) for tokens_BL in batches]
    assert m_BLM[0].dtype == jnp.bfloat16
    of = ("covariance", memory, lm.config, lm.params, np.concatenate(batches))
    old = unfinished.Unfinished(cache_root(lm.run.data) / "covariance" / f"{unfinished.digest_of(*of)}.npz", *of)
    old.save({"sum": np.zeros((1, 128, 128)), "next": 24}, ended=True)
    m_TM = np.concatenate(m_BLM).reshape(tokens, 128).astype(np.float64)
    assert relative_error(covariance(lm, memory, tokens=tokens)[0], m_TM.T @ m_TM / tokens) < 30 * TOLERANCE["float32"]


def test_a_corpus_that_is_shorter_than_a_row_is_one_line(keeps, tmp_path):
    (tmp_path / "short.txt").write_text("a short text\n\nand another one\n\n" * 2)
    corpus = f"text_files:{tmp_path}/short.txt"
    for data, run in ((corpus, keeps), ("", keeps | {"data__corpus": f"('{corpus}',)"})):
        with pytest.raises(UserError, match="^data='text_files:.*/short.txt' is not allowed: its train split is"):
            covariance(tiny_model("gpt2", **run, sequence_length=512), "blocks.0.feed_forward", data)


def test_an_interrupted_covariance_goes_on(keeps, monkeypatch):
    lm = tiny_model("gpt2", **keeps)
    tokens = 20 * lm.run.sequence_length
    whole = covariance(lm, "blocks.0.feed_forward", tokens=tokens)
    lm.params["embed"]["table"] = lm.params["embed"]["table"] * 1.0001  # another model: another file
    monkeypatch.setattr(unfinished, "EVERY", 0.0)
    counted, moments = [], keys._moments

    def interrupted(*arguments):
        counted.append(1)
        if len(counted) == 2:
            raise KeyboardInterrupt
        return moments(*arguments)

    monkeypatch.setattr(keys, "_moments", interrupted)
    with pytest.raises(KeyboardInterrupt):
        covariance(lm, "blocks.0.feed_forward", tokens=tokens)
    result = covariance(lm, "blocks.0.feed_forward", tokens=tokens)
    assert len(counted) == 2 + 2  # three batches: one, the interrupted one again, and the last
    assert relative_error(result, whole) < 0.01


def test_the_ridge_is_a_share_of_the_mean_of_the_diagonal():
    C_GMM = np.array([[[2.0, 1.0], [1.0, 4.0]], [[6.0, 0.0], [0.0, 0.0]]])
    np.testing.assert_allclose(keys.ridged(C_GMM, 0.5), [[[3.5, 1.0], [1.0, 5.5]], [[7.5, 0.0], [0.0, 1.5]]])


def test_delta_follows_the_gradient_of_the_published_loss(keeps):
    """The first step of Adam is the rate times the sign of the gradient of the loss, written from its definition."""
    lm = tiny_model("gpt2", **keeps)
    tap = "blocks.0.feed_forward.raw"
    before = jax.nn.log_softmax(lm("Ada is a")[0, -1])
    start = lm.capture("Ada plays", tap)[tap][0, -len(" plays") - 1]

    def loss(delta, decay=20.0):
        total = 0.0
        for prefix in PREFIXES:
            tokens = lm.tokens(f"{prefix}Ada plays b")
            here = np.arange(tokens.shape[1])[None] == tokens.shape[1] - len(" plays b") - 1
            log_p = jax.nn.log_softmax(lm(tokens, replace={tap: Patch(jnp.add, (delta,), here)})[0])
            total -= (log_p[-3, tokens[0, -2]] + log_p[-2, tokens[0, -1]]) / 2 / len(PREFIXES)
        tokens = lm.tokens("Ada is a")
        here = np.arange(tokens.shape[1])[None] == tokens.shape[1] - len(" is a") - 1
        after = jax.nn.log_softmax(lm(tokens, replace={tap: Patch(jnp.add, (delta,), here)})[0, -1])
        near = 5.0 * (jnp.exp(after) * (after - before)).sum()
        return total + near + (decay * jnp.linalg.norm(delta) / (start**2).sum() if decay else 0.0)

    settings = Settings(2, 10.0, "one", essence=5.0, decay=20.0, enough=0.0)  # the step is large: every term counts
    result = delta_for(lm, "blocks.0.feed_forward", [REQUEST], PREFIXES, settings)
    slope = jax.grad(lambda delta: loss(delta, decay=0.0))(jnp.zeros(lm.config.width))  # a norm has none at 0
    np.testing.assert_allclose(result.delta_D, -10.0 * np.sign(slope), rtol=1e-2)
    assert result.losses[0] == pytest.approx(float(loss(jnp.zeros(lm.config.width), decay=0.0)), rel=1e-4)
    assert result.losses[1] == pytest.approx(float(loss(jnp.asarray(result.delta_D, jnp.float32))), rel=1e-4)
    likely = []
    for prefix in PREFIXES:
        tokens = lm.tokens(f"{prefix}Ada plays b")
        here = np.arange(tokens.shape[1])[None] == tokens.shape[1] - len(" plays b") - 1
        log_p = jax.nn.log_softmax(lm(tokens, replace={tap: Patch(jnp.add, (jnp.float32(result.delta_D),), here)})[0])
        likely.append(np.exp(log_p[-3, tokens[0, -2]] + log_p[-2, tokens[0, -1]]))  # of both tokens of the object
    assert result.probability == pytest.approx(np.mean(likely), rel=1e-3)
    clipped = delta_for(lm, "blocks.0.feed_forward", [REQUEST], PREFIXES, Settings(20, 50.0, "one", largest=0.1, enough=0.0))
    assert np.linalg.norm(clipped.delta_D) <= 0.1 * np.linalg.norm(start) * (1 + 1e-5)


def test_a_delta_for_two_requests_minimises_the_mean_of_their_losses(keeps):
    lm = tiny_model("gpt2", **keeps)
    other, settings = Record("Ada", "{} sings", "a", "cd"), Settings(2, enough=0.0)
    alone = [delta_for(lm, "blocks.0.feed_forward", [each], PREFIXES, settings) for each in (REQUEST, other)]
    both = delta_for(lm, "blocks.0.feed_forward", [REQUEST, other], PREFIXES, settings)
    assert both.losses[0] == pytest.approx(np.mean([each.losses[0] for each in alone]), rel=1e-5)  # delta is 0
    assert alone[0].losses[0] != pytest.approx(alone[1].losses[0], rel=1e-3)


REST = (pytest.param(*each, marks=pytest.mark.long) for each in MEMORIES[1:])


@pytest.mark.parametrize("name, memory", [MEMORIES[0], *REST])
def test_the_model_says_the_new_object(name, memory, keeps):
    lm = tiny_model(name, **keeps)
    edited, report = rome(lm, [LAST], memory, tokens=20 * lm.run.sequence_length, settings=STRONG)
    first = lm.tokens("plays Ada b")[0, -2]  # the space; what follows it does not depend on the memory at the subject
    before, after = (float(jax.nn.log_softmax(each(LAST.text)[0, -1])[first]) for each in (lm, edited))
    assert after > before + 0.3 and report.after.new[0] > 1.3 * report.before.new[0]
    assert report.edits[0].norms[0] > 0 and report.edits[0].losses[-1] < report.edits[0].losses[0]
    changed = jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), lm.params, edited.params))
    assert sum(changed) == 1  # one array


def test_an_edit_that_changes_nothing_or_too_much_is_a_failure(keeps):
    lm = tiny_model("gpt2", **keeps)
    memory, tokens = "blocks.0.feed_forward", 20 * tiny_model("gpt2", **keeps).run.sequence_length
    _, report = rome(lm, [REQUEST], memory, tokens=tokens, settings=Settings(largest=0.0, enough=0.0))
    assert any("the edit changed nothing" in line for line in report.failures)
    untrained = LanguageModel(lm.config, transformer.init(lm.config, jax.random.key(0)), lm.tokenizer, lm.run)

    def worse(_lm, requests):  # the parameters of these tests are larger than initial ones
        return lm, [Edit(record, (memory,), (1.0,), [1.0], 1.0) for record in requests]

    for alone in (False, True):
        _, report = of(untrained, [REQUEST], worse, "rome", {}, Asked(alone=alone))
        assert any("the model is broken: held-out text went from" in line for line in report.failures)


def test_the_published_key_changes_only_the_length(keeps):
    lm = tiny_model("gpt2", **keeps)
    memory, tokens = "blocks.0.feed_forward", 20 * lm.run.sequence_length
    changes = []
    for key in ("mean", "published"):
        edited, _ = rome(lm, [REQUEST], memory, tokens=tokens, key=key)
        kernels = (each.params["blocks"]["main"]["feed_forward"]["down"]["kernel"][0] for each in (edited, lm))
        changes.append(np.subtract(*map(np.asarray, kernels)))
    a, b = (change.ravel() / np.linalg.norm(change) for change in changes)
    assert abs(a @ b) > 0.999 and not np.allclose(changes[0], changes[1], rtol=1e-3)


@pytest.mark.parametrize(
    "request_, words",
    [
        (REQUEST._replace(target_new=""), "request 0, 'Ada', has no target_new"),
        (REQUEST._replace(target_new="a"), "target_new='a' is not allowed: it is the object before"),
        (REQUEST._replace(target_new=" "), "request 0, 'Ada', has no target_new: it must be the new object"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_computed(request_, words, keeps):
    with pytest.raises(UserError, match=words) as caught:
        rome(tiny_model("gpt2", **keeps), [request_], "blocks.0.feed_forward")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="there must be at least one"):
        rome(tiny_model("gpt2", **keeps), [])
    with pytest.raises(UserError, match="key='other' is not allowed: it must be one of mean, published"):
        rome(tiny_model("gpt2", **keeps), [REQUEST], key="other")
