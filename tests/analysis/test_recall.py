"""Recall of facts: against a loop over single prompts, and on a model whose knowledge is built in."""

import json
import re

import jax
import numpy as np
import pytest

import xfresearch as xf
from tests.daily import daily
from tests.tiny_runs import tiny_config, tiny_model
from xfresearch import LanguageModel, analysis, analyze
from xfresearch.analysis.recall import score
from xfresearch.data.facts import Fact, facts
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.models import transformer
from xfresearch.runtime.errors import UserError
from xfresearch.train import main as train_main


def planted(successors: str, layout: str = "pre_norm") -> LanguageModel:
    """A model that says: after the last letter s of every prompt a space, and then the letters of `successors` in order."""
    post = layout in ("post_norm", "all_attention")
    changes = {"final_norm": "none"} if post else {}
    changes |= {"blocks__main__attention__memory_slots": 3} if layout == "all_attention" else {}
    changes |= {"width": 260, "depth": 1, "tie_embeddings": False, "blocks__main__layout": layout}
    config = tiny_config("gpt2", **{f"model__{name}": value for name, value in changes.items()})
    gain = lambda path, x: np.full(x.shape, float(path[-1].key == "gain"), x.dtype)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(gain, transformer.init(config.model, jax.random.key(0)))
    params["embed"]["table"] = np.eye(257, 260, dtype=np.float32)  # the stream is the token: nothing else is added
    head_VD = np.zeros((257, 260), np.float32)
    text = "s " + successors
    for before, after in zip(text, text[1:], strict=False):
        head_VD[ord(after), ord(before)] = 2.0
    params["head"]["table"] = head_VD
    return LanguageModel(config.model, params, ByteTokenizer(), config)


def fact(object_: str, subject: str = "Aa", relation: str = "r") -> Fact:
    return Fact(subject, relation, object_, (f"{subject} is", f"so {subject} is"), (f"what {subject} is",))


def slow(lm, prompt: str, object_: str) -> tuple[bool, float]:
    """Whether greedy decoding says the object, and the object's log probability, one token after the other."""
    ids = list(np.asarray(lm.tokens(prompt))[0])
    right, total = True, 0.0
    for token in lm.tokenizer.encode(f" {object_}".encode()):
        padded = np.array([ids + [7] * (64 - len(ids))])  # the model is causal, and one length is compiled once
        logits_V = np.asarray(lm(padded), np.float64)[0, len(ids) - 1]
        right &= int(logits_V.argmax()) == token
        total += logits_V[token] - np.log(np.exp(logits_V - logits_V.max()).sum()) - logits_V.max()
        ids.append(token)
    return bool(right), total


@pytest.mark.parametrize("name", daily(["moe"], ["gpt2", "moe", "all_attention"]))
def test_it_is_that_of_a_loop_over_prompts(name):
    lm = tiny_model(name)
    prompts = ["Aa is", "in the city of Bbb they say that it is", "x", "Cc Dd has a very long first name and is"]
    objects = ["Ee", "Ffff", "a longer object", "é"]
    result = score(lm, prompts, objects)
    for number, (prompt, object_) in enumerate(zip(prompts, objects, strict=True)):
        right, log_probability = slow(lm, prompt, object_)
        assert result.recalled[number] == right
        assert result.log_probability[number] == pytest.approx(log_probability, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("layout", daily(("pre_norm",), ("pre_norm", "post_norm", "output_norm", "all_attention")))
def test_a_planted_model_recalls_what_it_says_to_the_last_token(layout):
    lm = planted("Xyz", layout)
    known = [fact("Xyz"), fact("Xy", "Bb"), fact("Xq", "Cc"), fact("X", "Dd", "other"), fact("Yyz", "Ee", "other")]
    assert score(lm, ["Aa is"] * 5, [each.object for each in known]).recalled.tolist() == [True, True, False, True, False]
    result = analysis.recall(lm, known)
    np.testing.assert_array_equal(result.data["recalled"], [1, 1, 0, 1, 0])
    np.testing.assert_array_equal(result.data["recalled_held_out"], [1, 1, 0, 1, 0])
    np.testing.assert_array_equal(result.data["relation"], [0, 0, 0, 1, 1])
    assert result.data["probability"][[0, 2]] == pytest.approx([1.0, 0.0], abs=1e-3)
    assert result.summary["recalled"][0] == result.summary["recalled held out"][0] == 0.6
    first, second = result.tables[0].rows
    assert first[:3] == ("r", 3, 0.6667) and first[-1] == 0.3333 and second[:3] == ("other", 2, 0.5)


def test_figures_of_a_fact_are_means_over_its_prompts_of_each_kind():
    lm = planted("Xyz")
    known = [Fact("Aa", "r", "Xyz", ("Aa is", "Aa", "Aas"), ("Aa was", "Aa, that"))]
    result = analysis.recall(lm, known)
    assert result.data["recalled"] == pytest.approx([2 / 3]) and result.data["recalled_held_out"] == [0.5]
    assert result.data["probability"] == pytest.approx([2 / 3], abs=0.01)


def test_more_facts_than_a_batch_and_an_order_of_lengths():
    lm = planted("Xyz")
    names = [f"A{'b' * (number % 7)}s{number}" for number in range(45)]
    known = [fact("Xyz" if number % 3 else "Q" * (number % 5 + 1), name) for number, name in enumerate(names)]
    np.testing.assert_array_equal(analysis.recall(lm, known).data["recalled"], [float(n % 3 > 0) for n in range(45)])


def test_a_random_model_knows_nothing():
    result = analysis.recall(tiny_model("all_attention"), facts()[::80])
    assert result.summary["recalled"] == result.summary["recalled held out"] == (0.0, 0.0)


def test_mistakes_are_one_line():
    lm = tiny_model("gpt2")
    for arguments, words in (
        ({}, "data='python_stdlib' is not allowed: it must be a corpus of facts, facts or facts:PATH"),
        ({"data": "facts:/missing"}, "there is no such folder"),
        ({"facts": []}, "facts=.* is not allowed: it must have at least one fact"),
        ({"facts": [fact("x" * 90)]}, "sequence length 101 is not allowed: it must be at most 64"),
    ):
        with pytest.raises(UserError, match=words):
            analysis.recall(lm, **arguments)
    with pytest.raises(UserError, match="prompt='' is not allowed: it must have a token in front of the object"):
        score(lm, [""], ["x"])
    with pytest.raises(UserError, match="no tokenizer"):
        analysis.recall(LanguageModel(lm.config, lm.params, None, lm.run), [fact("x")])


def test_the_command_takes_a_corpus_of_facts(tmp_path, capsys):
    folder = tmp_path / "facts"
    folder.mkdir()
    relation = {"name": "r", "prompt_templates": ["{} is"], "samples": [{"subject": "A", "object": "B"}]}
    (folder / "a.json").write_text(json.dumps(relation))
    planted("B").save(tmp_path / "run")
    arguments = ["recall", "--workdir", str(tmp_path / "run"), "--data", f"facts:{folder}", "--to", str(tmp_path / "found")]
    analyze.main(arguments)
    assert re.search("recalled held out +1.0000", capsys.readouterr().out)
    assert (tmp_path / "found" / "report.html").exists()
    relation["samples"] += [{"subject": "C", "object": "D"}, {"subject": "E", "object": "F"}]
    (folder / "a.json").write_text(json.dumps(relation))
    for options, count in (([], 3), (["--count", "2"], 2)):  # facts, as the help of --count says
        analyze.main([*arguments, *options])
        assert f"{count} facts of" in (tmp_path / "found" / "report.html").read_text()


@pytest.mark.long
def test_the_tiny_config_learns_facts_and_not_only_sentences(tmp_path):
    """Each template is held out for another subject; recall of the held-out sentences is knowledge of the facts.

    Twelve templates, because five are too few: recall of the held-out sentences is then 0.7 to 0.9, by seed and CPU.
    """
    subjects, objects = ("Ann", "Bob", "Cid", "Dov", "Eve", "Fay", "Gus", "Hal"), ("red", "blue", "green", "black")
    templates = [f"{{}} {verb}" for verb in ("likes", "wears", "wants", "sees", "votes", "paints it", "dreams of")]
    templates += [f"The {noun} of {{}} is" for noun in ("colour", "car", "house", "flag")] + ["What {} buys is always"]
    samples = [{"subject": subject, "object": objects[n % 4]} for n, subject in enumerate(subjects)]
    relation = {"name": "colour", "prompt_templates": templates, "samples": samples}
    (tmp_path / "colour.json").write_text(json.dumps(relation))
    corpus = f"--config.data.corpus=('facts:{tmp_path}',)"
    arguments = ["--config", "configs/facts.py:tiny", corpus, f"--config.data.cache_dir={tmp_path}/cache"]
    train_main([*arguments, "--config.steps=1500", f"--workdir={tmp_path}/run"])
    actual = analysis.recall(xf.load(tmp_path / "run"))
    assert actual.summary["recalled"][0] > 0.95 and actual.summary["recalled held out"][0] > 0.8, actual.summary
