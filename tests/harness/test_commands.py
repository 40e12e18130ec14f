"""The command, of one run and of two: its figures from their definitions, its answers kept and used again."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.harness import local_data
from tests.harness.test_scoring import alone
from tests.tiny_runs import make_run, tiny_model
from tests.tolerances import TOLERANCE
from xfresearch import api, evaluate
from xfresearch.errors import UserError
from xfresearch.harness import commands, scoring, tasks

MISSING = "lm_eval is not installed: requirements-eval.txt"
KINDS = ("piqa", "winogrande", "lambada", "boolq")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return local_data.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    settings = {"data__cache_dir": str(folder / "cache"), "sequence_length": 64}
    return [make_run(folder / "a", "gpt2", **settings), make_run(folder / "b", "gpt2", steps=(1, 2, 3), **settings)]


@pytest.fixture
def lm_eval():
    return pytest.importorskip("lm_eval", reason=MISSING)


def evaluated(data, tmp_path, *options, names=KINDS) -> dict:
    out = tmp_path / "out.json"
    evaluate.main(["--tasks", ",".join(names), "--task-data", str(data), "--json", str(out), *map(str, options)])
    return json.loads(out.read_text())


def read_items(found: dict, name: str) -> list[dict]:
    return [json.loads(line) for line in Path(found["kept_in"], f"{name}-0_shot.jsonl").read_text().splitlines()]


def likelihood(lm, context: str, continuation: str) -> float:
    read, whole = (lm.tokenizer.encode(text.encode()).tolist() for text in (context, context + continuation))
    return alone(lm, scoring.continuation_windows(read, whole[len(read) :], 64))[0]


def test_figures_are_their_definitions(lm_eval, runs, data, tmp_path, capsys):
    found = evaluated(data, tmp_path, "--workdir", runs[0])
    lm, prompts = api.load(runs[0]), {"piqa": "{query}Answer:", "winogrande": "", "lambada": "{context}", "boolq": ""}
    right, lengths = [], []
    for line in (data / "piqa.jsonl").read_text().splitlines():
        item = json.loads(line)
        sums = [likelihood(lm, prompts["piqa"].format(**item), f" {choice}") for choice in item["choices"]]
        right.append(int(np.argmax(sums) == item["gold"]))
        lengths.append(int(np.argmax(np.divide(sums, list(map(len, item["choices"])))) == item["gold"]))
    figures = found["tasks"]["piqa"]["metrics"]
    assert figures["acc"]["value"] == np.mean(right) and figures["acc_norm"]["value"] == np.mean(lengths)
    assert figures["acc"]["standard_error"] == pytest.approx(np.std(right, ddof=1) / 8**0.5)
    sums = [likelihood(lm, item["arguments"][0][0], item["arguments"][0][1]) for item in read_items(found, "lambada")]
    perplexity = found["tasks"]["lambada"]["metrics"]["perplexity"]["value"]
    assert np.log(perplexity) == pytest.approx(-np.mean(sums), rel=TOLERANCE["float32"])
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["task", "items", "shots", "metric", "value", "+-"]
    assert len(out.splitlines()) == 1 + 6 and err.count("\n") == 1  # nothing of lm_eval's own talk


def test_prompts_are_lm_evals(lm_eval, data, tmp_path):
    names = tasks.local_names()
    found = {task.task_name: task for task in tasks.load(names, str(data), tmp_path)}
    asked = {name: requests_of(found[f"local_{name}"]) for name in names}
    question, ends = "Question: what is kept near the lamp in house 3?", ("lamp cloud", "garden river", "winter stone")
    choices = [f" the {end}" for end in (*ends, "copper paper")]
    assert asked["piqa"] == [(f"{question}\nAnswer:", choice) for choice in choices[:2]]
    assert asked["arc_easy"] == asked["arc_challenge"] == [(f"{question}\nAnswer:", choice) for choice in choices]
    assert asked["hellaswag"] == [("Houses: in house 3, someone", choice) for choice in choices]
    assert asked["boolq"] == [(f"House 3 has a lamp.\n{question}\nAnswer:", choice) for choice in (" no", " yes")]
    contexts = [f"Ann met Eve in house 3, so {name}" for name in ("Ann", "Eve")]
    assert asked["winogrande"] == [(context, " took the lamp.") for context in contexts]
    assert asked["lambada"] == [("In house 3 the lamp stands beside the", " copper")] == asked["bigbench_qa_wikidata"]
    assert asked["jeopardy"] == [("In house 3 the lamp stands beside the\nAnswer:", " copper")]
    assert asked["bigbench_dyck_languages"] == [("3\nInput: [ ( <\nOutput:", " > ) ]")]


def requests_of(task, number: int = 3) -> list[tuple[str, str]]:
    task.set_config("num_fewshot", 0)
    task.build_all_requests(rank=0, world_size=1)
    return [request.args for request in task.instances if request.doc_id == number]


def test_a_killed_evaluation_goes_on_where_it_stopped(lm_eval, data, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "gpt2", data__cache_dir=str(tmp_path / "cache"))
    batches, asked = scoring.batches, []

    def cut_short(requests, *more):
        asked.append(len(requests))
        yield from list(batches(requests, *more))[: None if len(asked) > 1 else -1]
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(scoring, "batches", cut_short)
    with pytest.raises(KeyboardInterrupt):
        evaluated(data, tmp_path, "--workdir", run, "--batch-size", 2)
    kept = len(next((run / "harness").glob("*/items.jsonl")).read_text().splitlines())
    resumed = evaluated(data, tmp_path, "--workdir", run, "--batch-size", 2)
    assert kept > 0 and asked[1] == asked[0] - kept > 0
    again = evaluated(data, tmp_path, "--workdir", run)
    assert again == resumed and asked[2:] == [0]


def test_another_step_length_or_model_has_its_own_answers(lm_eval, runs, data, tmp_path):
    options = [[runs[0], "--step", 10], [runs[0] / "checkpoints/20"], [runs[0], "--sequence-length", 32]]
    found = [evaluated(data, tmp_path, "--workdir", *given, names=["piqa"]) for given in options]
    assert len({one["kept_in"] for one in found}) == 3
    assert all(Path(one["kept_in"]).parent == runs[0] / "harness" for one in found)
    assert [(one["step"], one["sequence_length"]) for one in found] == [(10, 64), (20, 64), (20, 32)]


def test_two_runs_are_compared_item_by_item(lm_eval, runs, data, tmp_path, capsys, monkeypatch):
    for run in runs:
        evaluated(data, tmp_path, "--workdir", run)
    capsys.readouterr()
    monkeypatch.setattr(scoring, "batches", lambda requests, *_: iter(()) if not requests else 1 / 0)  # all are kept
    found = evaluated(data, tmp_path, "--compare", *runs)
    out = capsys.readouterr().out
    first, second = (one["tasks"]["piqa"]["metrics"]["acc"]["value"] for one in found["models"])
    piqa = found["comparison"]["piqa"]["acc"]
    assert (piqa["first"], piqa["second"], piqa["items"]) == (first, second, 8)
    items = [read_items(one, "piqa") for one in found["models"]]
    differences = [a["acc"] - b["acc"] for a, b in zip(*items, strict=True)]
    assert piqa["difference"] == np.mean(differences) and piqa["first_higher"] == differences.count(1)
    sums = [[item["perplexity"] for item in read_items(one, "lambada")] for one in found["models"]]
    assert found["comparison"]["lambada"]["log_likelihood"]["difference"] == pytest.approx(
        np.mean(sums[0]) - np.mean(sums[1])
    )
    acc = [found["comparison"][name]["acc"] for name in KINDS]
    assert min(one["p_holm"] for one in acc) == min(1, 4 * min(one["p"] for one in acc))  # four tasks, four tests
    assert all(f"items of {name}" in out or f" on {name}" in out for name in KINDS)


def test_examples_and_limits_reach_the_prompts(lm_eval, runs, data, tmp_path):
    found = evaluated(data, tmp_path, "--workdir", runs[0], "--fewshot", 2, "--limit", 3, names=["jeopardy", "piqa"])
    assert found["tasks"]["jeopardy"] | {"metrics": 0, "questions": 0} == {
        "items": 3,
        "fewshot": 2,
        "metrics": 0,
        "questions": 0,
    }
    lines = Path(found["kept_in"], "jeopardy-2_shot-first_3.jsonl").read_text().splitlines()
    prompt = json.loads(lines[0])["arguments"][0][0]
    assert len(lines) == 3 and prompt.count("\nAnswer: ") == 2 and "Answer:  " not in prompt
    assert prompt.endswith("In house 0 the river stands beside the\nAnswer:")


def test_texts_begin_with_what_the_tokenizer_says_they_do(lm_eval):
    from xfresearch.harness.adapter import Adapter
    from xfresearch.harness.items import Items

    adapter = Adapter(tiny_model("gpt2"), Items(), 64, 2)
    assert adapter.tok_encode("ab") == [97, 98] and adapter.prefix_token_id == 256
    adapter.lm.tokenizer.begin_of_text = 255
    assert adapter.tok_encode("ab") == [255, 97, 98] and adapter.prefix_token_id == 255
    assert adapter._encode_pair("a ", "b") == ([255, 97], [32, 98])
    found = adapter.loglikelihood([Instance(("", "b")), Instance((" ", "b"))])
    expected = [alone(adapter.lm, [scoring.Window([255, *text], len(text))])[0] for text in ([98], [32, 98])]
    assert [total for total, _ in found] == pytest.approx(expected, rel=TOLERANCE["float32"])


class Instance:
    def __init__(self, args: tuple):
        self.args = args


def test_models_that_were_asked_different_questions_are_not_compared():
    one, other = ({"piqa": {"questions": word, "values": {}}} for word in "ab")
    with pytest.raises(UserError, match="piqa asked the two models different questions"):
        commands.compare(one, other)


def test_values_that_are_no_numbers_are_left_out():
    """Groups have none, nor do metrics such as F1, which are made of pairs."""
    one = {"group": {"questions": "", "values": {}}, "piqa": {"questions": "q", "values": {"acc": [1.0, 0.0]}}}
    found = commands.compare(one, one)
    assert found["group"] == {} and found["piqa"]["acc"]["p_holm"] == 1
    assert len(commands.sentences("a", "b", found)) == 1 == len(commands.comparison_columns(found)["task"])


@pytest.mark.parametrize(
    "options, text",
    [
        (["--workdir", "{run}", "--task-data", "{data}"], "--task-data is not allowed without --tasks"),
        (["--workdir", "{run}", "--fewshot", "2"], "--fewshot is not allowed without --tasks"),
        (["--compare", "{run}", "{run}"], "--compare is not allowed without --tasks"),
        (["--tasks", "piqa"], "--workdir DIR or --compare DIR DIR is required"),
        (["--tasks", "piqa", "--workdir", "{run}", "--compare", "{run}", "{run}"], "one of the two"),
        (["--tasks", "piqa", "--workdir", "{run}", "--stride", "8"], "--stride is not allowed with --tasks"),
        (["--tasks", "piqa", "--workdir", "{run}", "--all-steps"], "--all-steps is not allowed with --tasks"),
        (["--tasks", "piqa", "--compare", "{run}", "{run}", "--step", "10"], "--step=10 is not allowed with --compare"),
        (["--tasks", "pica", "--workdir", "{run}", "--task-data", "{data}"], "did you mean 'piqa'"),
        (["--tasks", "piqa,,boolq", "--workdir", "{run}", "--task-data", "{data}"], "names with commas between them"),
        (["--tasks", "piqa", "--workdir", "{run}", "--task-data", "{run}"], "piqa.jsonl, the file of piqa, is not there"),
        (["--tasks", "piqa", "--workdir", "{run}", "--fewshot", "-1"], "--fewshot: -1 is not allowed"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(runs, data, options, text):
    with pytest.raises(UserError, match=text) as caught:
        evaluate.main([option.format(run=runs[0], data=data) for option in options])
    assert "\n" not in str(caught.value)


def test_without_lm_eval_the_command_says_what_to_install(runs, data, monkeypatch):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lm_eval, which is not installed: pip install -r requirements-eval\.txt"):
        evaluate.main(["--tasks", "piqa", "--workdir", str(runs[0]), "--task-data", str(data)])


@pytest.mark.parametrize(
    "text, reason",
    [
        ('{"query": "a"', "1: the line is not a JSON object"),
        ("[]", "1: the line is not a JSON object"),
        (
            '{"query": "a", "choices": ["b"], "gold": 0}\n{"query": "a", "gold": 0}',
            "2: no field 'choices', which --tasks=piqa",
        ),
    ],
)
def test_broken_task_data_is_named(lm_eval, runs, tmp_path, text, reason):
    (tmp_path / "piqa.jsonl").write_text(text)
    with pytest.raises(UserError, match=rf"piqa\.jsonl:{reason}") as caught:
        evaluate.main(["--tasks", "piqa", "--workdir", str(runs[0]), "--task-data", str(tmp_path)])
    assert "\n" not in str(caught.value)


def test_lengths_beyond_learned_positions_are_refused(lm_eval, runs, data):
    with pytest.raises(UserError, match="sequence length 65 is not allowed: it must be at most 64"):
        evaluate.main(
            ["--tasks", "piqa", "--workdir", str(runs[0]), "--task-data", str(data), "--sequence-length", "65"]
        )
