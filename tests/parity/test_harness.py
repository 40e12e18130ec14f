"""Our lm_eval adapter gives the same results as lm_eval's Hugging Face backend, for a GPT-2 with random weights and
requests of real items."""

import json

import pytest

from tests.parity.weights import MISSING
from xfresearch import evaluate
from xfresearch.loading import loading

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))
pytest.importorskip("lm_eval", reason=MISSING.format("lm_eval"))
pytestmark = pytest.mark.parity

LENGTH = 96  # of the model: shorter than some items of every task, longer than some items of most tasks
ITEMS = 12  # of each task
TOLERANCE = 1e-4  # nats of an item, as issue 5 allows


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared_data):
    """A GPT-2 with random weights as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("gpt2")
    tokenizer = shared_data / "tokenizers" / "gpt2_hf_tokenizer.json"
    end = "<|endoftext|>"
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token=end, bos_token=end).save_pretrained(
        path
    )
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": 50257}
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=50256, eos_token_id=50256))
    for parameter in module.parameters():  # with the initial weights, outputs would not depend on the context
        parameter.data += 0.3 * torch.randn_like(parameter)
    module.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    from lm_eval.models.huggingface import HFLM

    # By default it sums over an item's tokens in float32, whose last digit is 1e-4 of 1,000 nats.
    exact = {"dtype": "float32", "softmax_dtype": "float64"}
    return HFLM(pretrained=str(folder), device="cpu", batch_size=8, **exact)


@pytest.fixture(scope="module")
def ours(folder):
    from xfresearch.harness.adapter import Adapter
    from xfresearch.harness.items import Items

    return Adapter(loading.load(folder), Items(), LENGTH, 8)


def ask(model, kind: str, arguments: list) -> list:
    from lm_eval.api.instance import Instance

    return getattr(model, kind)([Instance(kind, {}, given, i) for i, given in enumerate(arguments)])


def requests_of(name: str, shared_data, tmp_path, fewshot: int = 0) -> list:
    from xfresearch.harness import tasks

    (task,) = tasks.load([name], str(shared_data / "eval"), tmp_path)["tasks"].values()
    task.set_config("num_fewshot", fewshot)
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=ITEMS, rank=0, world_size=1)
    return [request.args for request in task.instances]


def names() -> list[str]:
    from xfresearch.harness import tasks

    return tasks.local_names()


def check_likelihoods(ours, theirs, arguments: list) -> None:
    actual, expected = (ask(model, "loglikelihood", arguments) for model in (ours, theirs))
    assert max(abs(a - b) for (a, _), (b, _) in zip(actual, expected, strict=True)) < TOLERANCE
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("name", names())
def test_items_of_tasks_have_the_same_likelihood(ours, theirs, name, shared_data, tmp_path):
    check_likelihoods(ours, theirs, requests_of(name, shared_data, tmp_path))


def test_few_shot_items_have_the_same_likelihood(ours, theirs, shared_data, tmp_path):
    """They are longer than the model, so their start is truncated."""
    arguments = requests_of("piqa", shared_data, tmp_path, fewshot=3)
    assert any(len(ours.tok_encode(context)) > LENGTH for context, _ in arguments)
    check_likelihoods(ours, theirs, arguments)


def test_edge_cases_have_the_same_likelihood(ours, theirs):
    """No context, spaces before the continuation, several lines, characters of several tokens, and the greedy
    continuation."""
    start = "The cat sat on"
    arguments = [
        ("", "The cat"),
        ("The cat  ", "sat"),
        ("A\n\n", "B"),
        ("naïve", " 日本語"),
        (start, " the mat, twice."),
    ]
    greedy = ask(ours, "generate_until", [(start, {"until": [], "max_gen_toks": 3})])
    arguments += [(start, text) for text in greedy]
    check_likelihoods(ours, theirs, arguments)
    assert ask(ours, "loglikelihood", arguments)[-1][1]


def test_whole_texts_have_the_same_likelihood(ours, theirs, shared_data, tmp_path):
    texts = [(context,) for context, _ in requests_of("boolq", shared_data, tmp_path)[::2]] + [("short",)]
    lengths = [len(ours.tok_encode(text)) for (text,) in texts]
    assert min(lengths) < LENGTH and max(lengths) > 2 * LENGTH
    actual, expected = (ask(model, "loglikelihood_rolling", texts) for model in (ours, theirs))
    assert max(abs(a - b) for a, b in zip(actual, expected, strict=True)) < TOLERANCE


def test_texts_have_the_same_continuations(ours, theirs, shared_data, tmp_path):
    contexts = [context for context, _ in requests_of("jeopardy", shared_data, tmp_path)]
    contexts += [context for context, _ in requests_of("boolq", shared_data, tmp_path)[:4:2]]  # longer than the model
    free = [(context, {"until": [], "max_gen_toks": 24}) for context in contexts]
    actual, expected = (ask(model, "generate_until", free) for model in (ours, theirs))
    assert actual == expected and len(set(actual)) > 1
    stops = [[text[len(text) // 2 :][:3]] for text in actual]
    stopped = [(context, {"until": stop, "max_gen_toks": 24}) for context, stop in zip(contexts, stops, strict=True)]
    actual_stopped, expected_stopped = (ask(model, "generate_until", stopped) for model in (ours, theirs))
    assert actual_stopped == expected_stopped
    assert all(len(short) < len(text) for short, text in zip(actual_stopped, actual, strict=True))


def test_the_evaluate_command_reports_the_same_metrics(theirs, folder, shared_data, tmp_path, monkeypatch):
    from lm_eval import evaluator

    from xfresearch.harness import tasks

    monkeypatch.setenv("XFRESEARCH_CACHE", str(tmp_path / "cache"))
    data = shared_data / "eval"
    out = tmp_path / "out.json"
    chosen = ["lambada", "piqa", "winogrande"]
    arguments = ["--workdir", folder, "--tasks", ",".join(chosen), "--task-data", data, "--limit", ITEMS, "--json", out]
    evaluate.main(list(map(str, arguments)))
    written = json.loads(out.read_text())
    assert str(tmp_path / "cache") in written["kept_in"] and not (folder / "harness").exists()
    loaded = tasks.load(chosen, str(data), tmp_path)
    expected = evaluator.evaluate(theirs, loaded, limit=ITEMS, bootstrap_iters=0)["results"]
    for name in chosen:
        figures = {f"{metric},none": figure["value"] for metric, figure in written["tasks"][name]["metrics"].items()}
        assert figures and figures == pytest.approx({key: expected[f"local_{name}"][key] for key in figures}, rel=1e-4)
