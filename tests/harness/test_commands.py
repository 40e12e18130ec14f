"""evaluate --tasks: metrics match their definitions, and saved answers are reused."""

import json
import random
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.harness import local_data
from tests.harness.test_scoring import alone
from tests.tiny_runs import make_run, tiny_model
from tests.tolerances import TOLERANCE
from xfresearch import evaluate
from xfresearch.compare import main as compare_main
from xfresearch.harness import measuring, scoring, tasks
from xfresearch.harness.items import Items
from xfresearch.loading import loading
from xfresearch.runtime.errors import UserError
from xfresearch.studies import probes

MISSING = "lm_eval is not installed: requirements/eval.txt"
KINDS = ("piqa", "winogrande", "lambada", "boolq")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return local_data.write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    length = {"sequence_length": 64}
    return [make_run(folder / "a", "gpt2", **length), make_run(folder / "b", "gpt2", steps=(1, 2, 3), **length)]


@pytest.fixture
def lm_eval():
    return pytest.importorskip("lm_eval", reason=MISSING)


def Adapter(*arguments, **named):  # noqa: N802  the class cannot be imported without lm_eval
    from xfresearch.harness.adapter import Adapter

    return Adapter(*arguments, **named)


def evaluated(data, tmp_path, *options, names=KINDS) -> dict:
    out = tmp_path / "out.json"
    evaluate.main(["--tasks", ",".join(names), "--task-data", str(data), "--json", str(out), *map(str, options)])
    return json.loads(out.read_text())


def read_items(tables: dict, name: str) -> list[dict]:
    return [json.loads(line) for line in Path(tables["kept_in"], f"{name}-0_shot.jsonl").read_text().splitlines()]


def likelihood(lm, context: str, continuation: str) -> float:
    read, whole = (lm.tokenizer.encode(text.encode()).tolist() for text in (context, context + continuation))
    return alone(lm, scoring.continuation_windows(read, whole[len(read) :], 64))[0]


def test_metrics_match_their_definitions(lm_eval, runs, data, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not a git checkout: in one, lm_eval would ask git for the commit
    result = evaluated(data, tmp_path, "--workdir", runs[0])
    lm = loading.load(runs[0])
    prompts = {"piqa": "{query}Answer:", "winogrande": "", "lambada": "{context}", "boolq": ""}
    right, lengths = [], []
    for line in (data / "piqa.jsonl").read_text().splitlines():
        item = json.loads(line)
        sums = [likelihood(lm, prompts["piqa"].format(**item), f" {choice}") for choice in item["choices"]]
        right.append(int(np.argmax(sums) == item["gold"]))
        lengths.append(int(np.argmax(np.divide(sums, list(map(len, item["choices"])))) == item["gold"]))
    figures = result["tasks"]["piqa"]["metrics"]
    assert figures["acc"]["value"] == np.mean(right) and figures["acc_norm"]["value"] == np.mean(lengths)
    assert figures["acc"]["standard_error"] == pytest.approx(np.std(right, ddof=1) / 8**0.5)
    sums = [likelihood(lm, item["arguments"][0][0], item["arguments"][0][1]) for item in read_items(result, "lambada")]
    perplexity = result["tasks"]["lambada"]["metrics"]["perplexity"]["value"]
    assert np.log(perplexity) == pytest.approx(-np.mean(sums), rel=TOLERANCE["float32"])
    out, err = capfd.readouterr()
    assert out.splitlines()[0].split() == ["task", "items", "shots", "metric", "value", "std.", "error"]
    assert len(out.splitlines()) == 1 + 6 and err.count("\n") == 1  # no messages of lm_eval's own


def test_a_probe_of_a_study_is_the_metric_of_a_task(lm_eval, runs, data, tmp_path):
    task = evaluated(data, tmp_path, "--workdir", runs[0])["tasks"]["piqa"]
    names = "tasks.piqa", "tasks.boolq"
    result = probes.measure(loading.load(runs[0]), names, runs[0], str(data))
    assert list(result) == list(names) and result["tasks.piqa"] == next(iter(task["metrics"].values()))["value"]


def test_prompts_equal_those_of_lm_eval(lm_eval, data, tmp_path):
    names = tasks.local_names()
    actual = tasks.load(names, str(data), tmp_path)["tasks"]
    asked = {name: requests_of(actual[f"local_{name}"]) for name in names}
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


def test_a_killed_evaluation_resumes_where_it_stopped(lm_eval, data, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "gpt2")
    batches, asked = scoring.batches, []

    def cut_short(requests, *more):
        asked.append(len(requests))
        yield from list(batches(requests, *more))[: None if len(asked) > 1 else -1]
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(scoring, "batches", cut_short)
    with pytest.raises(KeyboardInterrupt):
        evaluated(data, tmp_path, "--workdir", run, "--batch-size", 2)
    saved = len(next((run / "harness").glob("*/items.jsonl")).read_text().splitlines())
    resumed = evaluated(data, tmp_path, "--workdir", run, "--batch-size", 2)
    assert saved > 0 and asked[1] == asked[0] - saved > 0
    again = evaluated(data, tmp_path, "--workdir", run)
    assert again == resumed and asked[2:] == [0]


def test_answers_of_another_step_or_length_are_separate(lm_eval, runs, data, tmp_path):
    options = [[runs[0], "--step", 10], [runs[0] / "checkpoints/20"], [runs[0], "--sequence-length", 32]]
    listed = [evaluated(data, tmp_path, "--workdir", *given, names=["piqa"]) for given in options]
    assert len({one["kept_in"] for one in listed}) == 3
    assert all(Path(one["kept_in"]).parent == runs[0] / "harness" for one in listed)
    assert [(one["step"], one["sequence_length"]) for one in listed] == [(10, 64), (20, 64), (20, 32)]


def test_answers_of_another_dtype_or_tokenizer_are_separate(runs):
    def folder(**changes) -> Path:
        lm = loading.load(runs[0])
        lm.config = replace(lm.config, **changes.pop("config", {}))
        vars(lm.tokenizer).update(changes)
        return measuring.answers_folder(runs[0], lm, 64)

    assert folder() == folder()
    assert len({folder(), folder(config={"dtype": "bfloat16"}), folder(digest="another")}) == 3


def test_items_with_any_values_are_written_and_numbers_are_metrics(tmp_path):
    """Tasks return values of any type. NumPy numbers count as numbers too."""
    item = {"doc_id": 0, "filter": "none", "arguments": [("a", "b")], "target": {3}, "filtered_resps": [(-1.0, True)]}
    item |= {"metrics": ["acc", "f1"], "acc": np.float32(0.5), "f1": (np.int64(1), 0)}
    item |= {"doc_hash": "d", "prompt_hash": "p", "target_hash": "t"}
    row = {"alias": "odd", "acc,none": np.float32(0.5), "acc_stderr,none": "N/A", "f1,none": {"no": "number"}}
    counts = {"n-samples": {"odd": {"effective": 1}}, "n-shot": {"odd": 0}, "higher_is_better": {"odd": {"acc": True}}}
    task = measuring.task_metrics("odd", [item], counts | {"results": {"odd": row}})
    assert task["values"] == {"acc": [0.5]} and task["lower_is_better"] == []
    assert task["metrics"] == {"acc": {"value": 0.5, "standard_error": None}}
    measuring.write_items(tmp_path, "odd", task, [item], 0)
    written = json.loads((tmp_path / "odd-0_shot.jsonl").read_text())
    assert (written["acc"], written["f1"], written["target"]) == (0.5, [1, 0], "{3}")


def test_a_comparison_finds_the_saved_answers(lm_eval, runs, data, tmp_path, capsys, monkeypatch):
    for run in runs:
        evaluated(data, tmp_path, "--workdir", run)
    monkeypatch.setattr(scoring, "batches", lambda *_: 1 / 0)  # no model answers again
    (tmp_path / "notes.txt").write_text("".join(f"line {i}\n" for i in range(400)))
    compare_main([*map(str, runs), f"--data=text_files:{tmp_path}/notes.txt", "--limit=4", f"--json={tmp_path}/out.json"])
    written = json.loads((tmp_path / "out.json").read_text())["tasks"]
    folders = [next((run / "harness").glob("*/piqa-0_shot.jsonl")).parent for run in runs]
    for task, metric in (("piqa", "acc"), ("lambada", "perplexity")):
        values = [
            [json.loads(line)[metric] for line in (folder / f"{task}-0_shot.jsonl").read_text().splitlines()]
            for folder in folders
        ]
        name = {"perplexity": "log_likelihood"}.get(metric, metric)
        pair = written[f"{task}-0_shot"][name][str(runs[1])]
        assert pair["items"] == 8 and pair["difference"] == pytest.approx(np.mean(values[1]) - np.mean(values[0]))
    assert {name.removesuffix("-0_shot") for name in written} == set(KINDS)
    assert "piqa-0_shot" in capsys.readouterr().out


def test_fewshot_and_limit_change_the_prompts(lm_eval, runs, data, tmp_path):
    result = evaluated(data, tmp_path, "--workdir", runs[0], "--fewshot", 2, "--limit", 3, names=["jeopardy", "piqa"])
    assert {name: result["tasks"]["jeopardy"][name] for name in ("items", "fewshot")} == {"items": 3, "fewshot": 2}
    lines = Path(result["kept_in"], "jeopardy-2_shot-first_3.jsonl").read_text().splitlines()
    prompt = json.loads(lines[0])["arguments"][0][0]
    assert len(lines) == 3 and prompt.count("\nAnswer: ") == 2 and "Answer:  " not in prompt
    assert prompt.endswith("In house 0 the river stands beside the\nAnswer:")


def test_solved_examples_are_other_items(lm_eval, data, tmp_path):
    """Here they are all 7 others; 8 examples would need one more item."""
    loaded = tasks.load(["piqa", "winogrande"], str(data), tmp_path)["tasks"]
    measuring.set_examples(loaded, 7)
    for task in loaded.values():
        task.build_all_requests(rank=0, world_size=1)
        prompts = {request.doc_id: request.args[0] for request in task.instances}
        assert all(prompts[i].count(f"house {i}") == 1 for i in range(8)) and len(prompts) == 8
    with pytest.raises(UserError, match=r"--fewshot=8.* below 8, the items of .*piqa\.jsonl"):
        tasks.load(["piqa"], str(data), tmp_path, examples=8)


def test_tasks_that_set_zero_examples_keep_zero(capsys):
    loaded = {name: Shots(own) for name, own in {"none": 0, "some": 3, "unsaid": None}.items()}
    for asked, expected in ((None, [0, 3, 0]), (5, [0, 5, 5]), (0, [0, 0, 0])):
        measuring.set_examples(loaded, asked)
        assert [task.shots for task in loaded.values()] == expected
    assert capsys.readouterr().err == "--fewshot=5 does not apply to none: its task file sets 0\n"


class Shots:
    def __init__(self, own: int | None):
        self.own = own

    def get_config(self, key: str):
        return {"num_fewshot": self.own}[key]

    def set_config(self, key: str, value: int):
        assert key == "num_fewshot"
        self.shots = value

    def set_fewshot_seed(self, seed: int):
        pass


def test_nested_groups_and_tasks_named_twice_are_evaluated_once(lm_eval, data, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    for name in ("piqa", "boolq"):
        config = tasks._config(name) | {"dataset_kwargs": {"data_files": {"test": str(data / f"{name}.jsonl")}}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))
    for name, members in {"inner": ["local_piqa"], "outer": ["inner", "local_boolq"]}.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"group": name, "task": members}))
    own = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(tasks, "_manager", lambda folder: own)
    result = tasks.load(["outer", "local_piqa"], "", tmp_path)
    assert set(result["tasks"]) == {"local_piqa", "local_boolq"} and set(result["groups"]) == {"outer", "inner"}
    from lm_eval import evaluator

    measuring.set_examples(result["tasks"], None)
    adapter = Adapter(tiny_model("gpt2"), Items(), 64, 2)
    results = evaluator.evaluate(lm=adapter, task_dict=result, limit=2, bootstrap_iters=0)
    assert set(results["samples"]) == {"local_piqa", "local_boolq"}


def test_the_random_choices_of_tasks_are_the_same_for_every_model(lm_eval, runs, data, tmp_path, monkeypatch):
    """Some tasks shuffle their choices while they are loaded."""
    drawn = []
    monkeypatch.setattr(tasks, "load", lambda *_: drawn.append((random.random(), np.random.random())) or 1 / 0)
    for run in runs:
        with pytest.raises(ZeroDivisionError):
            evaluated(data, tmp_path, "--workdir", run)
    assert drawn[0] == drawn[1]


def test_texts_begin_with_the_tokenizers_begin_of_text_token(lm_eval):
    adapter = Adapter(tiny_model("gpt2"), Items(), 64, 2)
    assert adapter.tok_encode("ab") == [97, 98] and adapter.prefix_token_id == 256
    adapter.lm.tokenizer.begin_of_text = adapter.lm.tokenizer.bos = 255
    assert adapter.tok_encode("ab") == [255, 97, 98] and adapter.prefix_token_id == 255
    assert adapter._encode_pair("a ", "b") == ([255, 97], [32, 98])
    result = adapter.loglikelihood([Instance(("", "b")), Instance((" ", "b"))])
    expected = [alone(adapter.lm, [scoring.Window([255, *text], len(text))])[0] for text in ([98], [32, 98])]
    assert [total for total, _ in result] == pytest.approx(expected, rel=TOLERANCE["float32"])


def test_a_context_is_the_source_of_a_model_with_an_encoder(lm_eval):
    from xfresearch.harness.adapter import PairedAdapter

    lm = tiny_model("tasks/reverse", source_length=24, sequence_length=24)
    adapter = PairedAdapter(lm, Items(), 24, 2)
    result = adapter.loglikelihood([Instance(("abc ", " cba")), Instance(("", "b"))])
    for (context, target), (total, _) in zip((("abc ", "cba"), ("", "b")), result, strict=True):
        read = [[*context.encode(), 256]]
        expected = -float(np.asarray(lm.loss([[256, *target.encode()]], source=read), np.float64).sum())
        assert total == pytest.approx(expected, rel=10 * TOLERANCE["float32"])
    (text,) = adapter.generate_until([Instance(("abc", {"until": ["!"], "max_gen_toks": 4, "do_sample": False}))])
    assert text == lm.generate(source="abc", max_new_tokens=4, temperature=0.0).split("!")[0]
    with pytest.raises(UserError, match="the encoder reads a context, and the task asks for the likelihood of whole texts"):
        adapter.loglikelihood_rolling([Instance(("abc",))])


def test_a_model_that_diverged_has_no_metrics(lm_eval):
    """With NaN, lm_eval would take the first choice, and count it as correct if it happens to be."""
    lm = tiny_model("gpt2")
    lm.params = jax.tree.map(lambda x: x * np.nan, lm.params)
    with pytest.raises(UserError, match="runs/a computes log-likelihoods that are NaN"):
        Adapter(lm, Items(), 64, 2, name="runs/a").loglikelihood([Instance(("a", "b"))])


def test_tokens_beyond_the_models_vocabulary_raise_an_error(lm_eval):
    lm = tiny_model("gpt2")
    lm.config = replace(lm.config, vocab_size=256)
    with pytest.raises(UserError, match="tokenizer has token 256, but the model's vocabulary ends at 255"):
        Adapter(lm, Items(), 64, 2).loglikelihood_rolling([Instance(("ab",))])


def test_a_rolling_likelihood_reads_the_begin_of_text_token_and_does_not_predict_it(lm_eval):
    lm = tiny_model("gpt2")
    items = Items()
    for begin, bos in ((5, 5), (None, 6)):  # the second as in Phi-3's folders, and not the answer that was saved after 5
        lm.tokenizer.begin_of_text, lm.tokenizer.bos = begin, bos
        result = Adapter(lm, items, 64, 2).loglikelihood_rolling([Instance(("ab",))])
        assert result == pytest.approx([-float(lm.loss([[bos, 97, 98]]).sum())], rel=1e-5)


class Instance:
    def __init__(self, args: tuple):
        self.args = args


@pytest.mark.parametrize(
    "options, text",
    [
        (["--workdir", "{run}", "--task-data", "{data}"], "--task-data is not allowed without --tasks"),
        (["--workdir", "{run}", "--fewshot", "2"], "--fewshot is not allowed without --tasks"),
        (["--compare", "{run}", "{run}"], "--compare .*: python -m xfresearch.compare"),
        (["--tasks", "piqa"], "required: --workdir"),
        (["--tasks", "piqa", "--workdir", "{run}", "--stride", "8"], "--stride is not allowed with --tasks"),
        (["--tasks", "piqa", "--workdir", "{run}", "--job", "0"], "--job=0 is not allowed without --all-steps"),
        (["--tasks", "pica", "--workdir", "{run}", "--task-data", "{data}"], "did you mean 'piqa'"),
        (["--tasks", "piqa,,boolq", "--workdir", "{run}", "--task-data", "{data}"], "names separated by commas"),
        (["--tasks", "piqa", "--workdir", "{run}", "--task-data", "{run}"], "no file piqa.jsonl, which piqa reads"),
        (["--tasks", "piqa", "--workdir", "{run}", "--fewshot", "-1"], "--fewshot: -1"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(runs, data, options, text):
    with pytest.raises(UserError, match=text) as caught:
        evaluate.main([option.format(run=runs[0], data=data) for option in options])
    assert "\n" not in str(caught.value)


def test_without_lm_eval_the_error_names_what_to_install(runs, data, monkeypatch):
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lm_eval.*: pip install 'xfresearch\[eval\]', or in .* -r requirements/eval\.txt"):
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
def test_the_error_names_the_line_of_broken_task_data(lm_eval, runs, tmp_path, text, reason):
    (tmp_path / "piqa.jsonl").write_text(text)
    with pytest.raises(UserError, match=rf"piqa\.jsonl:{reason}") as caught:
        evaluate.main(["--tasks", "piqa", "--workdir", str(runs[0]), "--task-data", str(tmp_path)])
    assert "\n" not in str(caught.value)


ITEM = {"query": "a", "choices": ["b", "c"], "gold": 1}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"gold": 2}, "gold=2.* the index of a choice, 0 to 1"),
        ({"gold": "1"}, "gold='1'.* the index of a choice"),
        ({"gold": None}, "gold=None"),
        ({"gold": -1}, "gold=-1"),
        ({"choices": "bc"}, "choices='bc'.* a list of non-empty strings"),
        ({"choices": []}, r"choices=\[\]"),
        ({"choices": ["b", ""]}, "choices=.* must be"),
        ({"choices": [1, 2]}, "choices=.* must be"),
        ({"query": 5}, "query=5.* a string"),
    ],
)
def test_the_error_names_values_that_would_give_wrong_metrics(tmp_path, changes, reason):
    (tmp_path / "piqa.jsonl").write_text(json.dumps(ITEM) + "\n" + json.dumps(ITEM | changes) + "\n")
    with pytest.raises(UserError, match=rf"piqa\.jsonl:2: {reason}"):
        tasks.check_data("piqa", str(tmp_path))


def test_the_error_names_a_file_without_items(tmp_path):
    (tmp_path / "piqa.jsonl").write_text("")
    with pytest.raises(UserError, match=r"piqa\.jsonl is empty: --tasks=piqa has no items"):
        tasks.check_data("piqa", str(tmp_path))


def test_lengths_beyond_the_position_table_raise_an_error(lm_eval, runs, data):
    with pytest.raises(UserError, match="sequence length 65.* at most 64"):
        options = ["--task-data", str(data), "--sequence-length", "65"]
        evaluate.main(["--tasks", "piqa", "--workdir", str(runs[0]), *options])
