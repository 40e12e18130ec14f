"""Runs against each other: losses equal evaluate's, intervals those by hand, a gap is a note, the page needs no network."""

import io
import json
import math
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import xfresearch as xf
from tests.data import made_tokenizers
from tests.pages.test_cards import check
from tests.tiny_runs import make_run, rough_params, tiny_config
from tests.tolerances import TOLERANCE
from tests.training.processes import Processes
from tests.training.test_report import browse
from xfresearch import evaluate
from xfresearch.compare import main as compare_main
from xfresearch.compare import parse as compare_options
from xfresearch.comparing import held_out, page, runs
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.evaluation.losses import Scores, Text, Window
from xfresearch.loading import loading
from xfresearch.loading.language_model import LanguageModel
from xfresearch.pages.colours import LIGHT
from xfresearch.run_config.closed_form import costs
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import write_json
from xfresearch.training.metrics import MetricsLog

WORDS = "the cat sat on the mat. naïve\n"
STEPS = tiny_config().steps


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Overrides for a corpus of documents, and the path of a corpus of a single one."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(240):
        (folder / f"{number}.txt").write_text(f"{number} " + WORDS * (1 + number % 5))
    single = folder / "single.log"
    single.write_text("".join(f"{i} the man and the plan\n" for i in range(600)))
    overrides = {"data__corpus": repr((f"text_files:{folder}/*.txt",)), "sequence_length": 16, "model__depth": 1}
    return overrides, f"text_files:{single}"


def add_metrics(directory, shift: float = 0.0, last: int = STEPS, cpu: str = "some processor") -> None:
    """The metrics of a run that has reached step `last`, at 2 seconds per step."""
    log = MetricsLog(directory, 0)
    for step in range(1, last + 1):
        loss = {"loss": 5 - step / 10 + shift, "bits_per_byte": 7 - step / 10 + shift}
        log.write(step, "train", loss | {"seconds": 2.0 * step})
        if step % 5 == 0:
            log.write(step, "evaluation", loss)
    log.close()
    start = {"seconds": 1.0, "gap": 0.0, "finished_before": False, "versions": {}, "commit": "", "machine": {"cpu": cpu}}
    write_json(directory / "run.json", {"starts": [start]})


def make_trained(directory, name: str, shift: float = 0.0, **overrides):
    make_run(directory, name, steps=(10, STEPS), **overrides)
    add_metrics(directory, shift)
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory, texts):
    """Two runs: a GPT-2 and a mixture of experts."""
    folder = tmp_path_factory.mktemp("runs")
    return [make_trained(folder / "a", "gpt2", **texts[0]), make_trained(folder / "b", "moe", 0.5, **texts[0])]


@pytest.fixture(scope="module")
def imported(trained, texts, tmp_path_factory):
    """The model of the first run without its metrics, and with other data and options of training."""
    lm = loading.load(trained[0])
    data = replace(lm.run.data, corpus=(texts[1],), packing="documents")
    lm.run = replace(lm.run, seed=3, batch_size=3, sequence_length=8, data=data)
    folder = tmp_path_factory.mktemp("imported") / "i"
    lm.save(folder)
    return folder


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory, texts):
    """A model without metrics whose tokenizer has a few tokens of several bytes."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "tokenizer.json").write_text(made_tokenizers.byte_level())
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    config = tiny_config("gpt2", **texts[0])
    config = replace(config, model=replace(config.model, vocab_size=320))
    LanguageModel(config.model, rough_params(config.model, 5), tokenizer, config).save(folder / "c")
    return folder / "c"


def compared(tmp_path, *arguments) -> dict:
    out = tmp_path / "compared.json"
    compare_main([*map(str, arguments), "--json", str(out)])
    return json.loads(out.read_text())


def evaluated(tmp_path, run, *options) -> dict:
    out = tmp_path / "evaluated.json"
    evaluate.main(["--workdir", str(run), "--json", str(out), *options])
    return json.loads(out.read_text())


def interval_by_hand(nats, sizes, other_nats, other_sizes) -> tuple[float, float, float]:
    """The difference of two losses and Student's interval, by the delta method written out with covariances."""
    from scipy.stats import t

    n = len(nats)
    total, other_total = sum(sizes), sum(other_sizes)
    loss, other = sum(nats) / total, sum(other_nats) / other_total
    covariance = np.cov(np.array([nats, sizes, other_nats, other_sizes])) * n
    slope = np.array([1 / total, -loss / total, -1 / other_total, other / other_total])
    margin = math.sqrt(slope @ covariance @ slope) * t.ppf(0.975, n - 1)
    return loss - other, loss - other - margin, loss - other + margin


@pytest.fixture(scope="module")
def comparison(trained, imported, tmp_path_factory):
    """The comparison of two runs and the model of the first one: its JSON, its text and its page."""
    folder = tmp_path_factory.mktemp("comparison")
    with redirect_stdout(io.StringIO()) as out:
        result = compared(folder, *trained, imported, "--margin", "0.01", "--html", folder / "page.html")
    return SimpleNamespace(data=result, runs=list(result["runs"].values()), text=out.getvalue(), page=folder / "page.html")


@pytest.fixture(scope="module")
def documents(trained, tmp_path_factory):
    """evaluate's figures of the two runs, with those of each document."""
    return [evaluated(tmp_path_factory.mktemp("evaluated"), run, "--per-document") for run in trained]


def test_losses_and_intervals_over_documents(comparison, documents):
    assert comparison.data["measure"] == "loss" and comparison.data["held_out"]["unit"] == "documents"
    for run, own in zip(comparison.runs, documents, strict=False):
        measured = run["held_out"]
        assert measured["value"] == pytest.approx(own["loss"], rel=1e-12) and measured["units"] == own["units"] > 5
        assert measured["standard_error"] == pytest.approx(own["standard_error"], rel=1e-9)
    first, second = (sums(own, "loss", "tokens") for own in documents)
    difference, *interval = interval_by_hand(*second, *first)
    pair = comparison.runs[1]["held_out"]["pair"]
    assert pair["difference"] == pytest.approx(difference) and pair["interval"] == pytest.approx(interval)
    assert interval[0] > 0 and pair["verdict"] == "worse on this text" and "pair" not in comparison.runs[0]["held_out"]


def sums(evaluated: dict, loss: str, size: str) -> tuple[list, list]:
    """The nats or bits of each document, and its size."""
    return [d[loss] * d[size] for d in evaluated["documents"]], [d[size] for d in evaluated["documents"]]


def test_equal_models_are_equal_within_a_margin(comparison):
    pair = comparison.runs[2]["held_out"]["pair"]
    assert pair["difference"] == 0 and pair["interval"] == [0, 0] and pair["verdict"] == "equal within 0.01 on this text"


def test_other_tokenizers_are_compared_in_bits_per_byte(trained, other_tokenizer, documents, tmp_path, capsys):
    result = compared(tmp_path, trained[0], other_tokenizer)
    each = [documents[0], evaluated(tmp_path, other_tokenizer, "--per-document")]
    assert result["measure"] == "bits_per_byte" and each[1]["tokens"] < each[0]["tokens"]
    first, second = (sums(own, "bits_per_byte", "bytes") for own in each)
    difference, *interval = interval_by_hand(*second, *first)
    own = result["runs"][str(other_tokenizer)]["held_out"]
    assert own["value"] == pytest.approx(each[1]["bits_per_byte"]) and own["units"] == each[0]["units"]
    assert own["pair"]["difference"] == pytest.approx(difference) and own["pair"]["interval"] == pytest.approx(interval)
    assert result["runs"][str(trained[0])]["training_loss"] == pytest.approx(7 - 2.05)
    assert "Losses are in bits per byte." in capsys.readouterr().out


def test_a_text_of_one_document_is_paired_by_sequence(trained, other_tokenizer, texts, tmp_path):
    """Models with other tokenizers read the same bytes, although 40 sequences of the first run end inside the text."""
    given = ["--data", texts[1], "--split", "train", "--limit", "40"]
    options = compare_options([*map(str, trained), *given])
    model = held_out.load(str(trained[0]), options, None)
    reference = held_out.first_reads(model, options)
    first = held_out.measure(model, options, reference).sums
    second = held_out.measure(held_out.load(str(other_tokenizer), options, reference), options, reference).sums
    assert len(first["bytes"]) == len(second["bytes"]) == 40 and first["bytes"].sum() == 40 * 16
    assert abs(second["bytes"] - first["bytes"]).max() <= 2 * 4  # a token that crosses an edge belongs to one side
    assert abs(second["bytes"].sum() - first["bytes"].sum()) <= 4
    assert second["tokens"].sum() < first["tokens"].sum()
    own = evaluated(tmp_path, trained[0], *given)
    measured = held_out.compare({"a": first, "c": second}, "loss", 0.0)["a"]
    assert reference.data.unit == own["unit"] == "sequences" and measured["units"] == own["units"] == 40
    assert measured["value"] == pytest.approx(own["loss"], rel=1e-12)
    assert measured["standard_error"] == pytest.approx(own["standard_error"], rel=1e-9)


def text(sizes: list[int], rows: list[list[Window]], documents=None, digest="a") -> Text:
    documents = np.zeros(len(sizes), int) if documents is None else np.array(documents)
    unit = "documents" if documents.max() else "sequences"
    each = {"bytes": np.array(sizes, float)}
    return Text("", "", np.zeros(len(sizes), int), documents, each, rows, 2, 2, unit, digest)


def test_a_token_belongs_to_the_unit_with_its_first_byte():
    """The first run scores bytes 1 to 4 and 5 to 6 of 8. The other's tokens start at the bytes 0, 3, 4, 6 and 7."""
    reference = text([1] * 8, [[Window(0, 1, 5)], [Window(4, 5, 7)]])
    assert held_out.edges(reference).tolist() == [1, 5, 7]
    other = text([3, 1, 2, 1, 1], [[Window(0, 1, 5)]], digest="b")
    assert held_out.byte_starts(other).tolist() == [0, 3, 4, 6, 7]
    scores = Scores(np.array([9.0, 1, 2, 4, 8]), np.zeros(5), np.array([-1, 0, 0, 0, 0]), 1.0)
    sums = held_out._unit_sums(other, scores, reference)
    assert sums["nll"].tolist() == [3, 4] and sums["bytes"].tolist() == [3, 1] and sums["tokens"].tolist() == [2, 1]


def test_documents_that_a_limit_leaves_out_are_empty_units():
    reference = text([1] * 6, [[Window(0, 1, 2), Window(2, 3, 4)]], [0, 0, 1, 1, 2, 2])
    scores = Scores(np.ones(6), np.zeros(6), np.array([-1, 0, -1, 0, -1, -1]), 1.0)
    assert held_out._unit_sums(reference, scores, reference)["tokens"].tolist() == [1, 1, 0]


def test_the_table_has_costs_and_what_was_trained(comparison, trained):
    own = costs(loading.run_config(trained[1]).model, 16)
    run = comparison.runs[1]
    assert (run["parameters"], run["flops_per_token"]) == (own.parameters, own.flops_per_token)
    tokens = STEPS * tiny_config("moe").batch_size * 16
    assert (run["steps"], run["tokens"], run["seconds"]) == (STEPS, tokens, 2.0 * STEPS)
    assert run["training_loss"] == pytest.approx(5.5 - 2.05)  # the mean of the last 20 of 30 rows
    options, losses, meaning, groups, *_ = comparison.text.split("\n\n")
    assert options.split()[:2] == ["option", str(trained[0])]
    assert "these runs" in losses.splitlines()[0] and f" {own.parameters / 1000:.3g}k " in losses.splitlines()[2]
    ends = ["reference", "worse on this text", "equal within 0.01 on this text"]
    assert all(line.endswith(end) for line, end in zip(losses.splitlines()[1:], ends, strict=True))
    assert "another seed" in meaning
    first, second, third = groups.splitlines()[1:]
    assert first.endswith("reference") and "none: one seed each; with 0." in second and third.endswith("none: one seed each")


def test_options_that_differ(comparison, trained, imported):
    actual = comparison.data["differences"]
    a, b, i = map(str, [*trained, imported])
    assert actual["model.final_norm"] == {a: "layer", b: "rms", i: "layer"}
    assert actual["model.blocks.main.feed_forward.bias"] == {a: True, i: True}  # the experts have no such option
    assert not any(len(values) < 3 and name.endswith(".capacity") for name, values in actual.items())  # at its default
    assert all(name.startswith("model.") for name in actual)  # the model without a run has no options of training


def test_a_model_without_a_run_has_a_loss_alone(comparison, imported):
    run = comparison.runs[2]
    assert (run["steps"], run["seconds"], run["training_loss"]) == (None, None, None) and run["held_out"]
    assert comparison.data["notes"] == [f"{imported} has no metrics, so it has no curves"]


def test_curves_by_step_tokens_flops_and_seconds(trained):
    run = runs.read(str(trained[0]))
    tokens = run.config.batch_size * 16
    flops = 3 * costs(run.config.model, 16).flops_per_token * tokens
    for axis, scale in {"step": 1, "tokens": tokens, "flops": flops, "seconds": 2.0}.items():
        assert runs.curve(run, "train", "loss", axis)[:2].tolist() == [[scale, 4.9], [2 * scale, 4.8]]
        assert runs.curve(run, "evaluation", "loss", axis).tolist()[-1] == [STEPS * scale, 2.0]
    sparse = run._replace(rows=[row for row in run.rows if (row["step"], row["kind"]) != (STEPS, "train")])
    assert runs.curve(sparse, "evaluation", "loss", "seconds").tolist()[-1] == [2.0 * (STEPS - 1), 2.0]
    without = run._replace(rows=[{k: v for k, v in row.items() if k != "seconds"} for row in run.rows])
    assert runs.curve(without, "train", "loss", "seconds").shape == (0, 2)
    assert len(runs.curve(without, "train", "loss", "step")) == STEPS


def test_held_out_losses_on_different_texts_have_charts_of_their_own(trained):
    run = runs.read(str(trained[0]))
    other = run._replace(path="b", config=replace(run.config, evaluation=replace(run.config.evaluation, split="test")))
    same = run._replace(path="c")
    corpus = run.config.data.corpus[0]
    for axis in runs.AXES:
        charts = page.charts([run, other, same], "loss", "nats")[axis]
        counts = {chart.title: len(chart.curves) for chart in charts}
        names = [f"Held-out loss on {corpus}, {split}" for split in (run.config.evaluation.split, "test")]
        assert counts == {"Training loss": 3, names[0]: 2, names[1]: 1}
        of_one_text = page.charts([run, same], "loss", "nats")[axis]
        assert [chart.title for chart in of_one_text] == ["Training loss", "Held-out loss"]


def test_what_a_run_lacks_is_a_note(trained, texts, tmp_path, capsys):
    """A run before its first checkpoint, on another machine, without seconds; and an older checkpoint of a run."""
    started = tmp_path / "started"
    shutil.copytree(trained[1], started, ignore=shutil.ignore_patterns("checkpoints"))
    (started / "metrics.jsonl").unlink()
    add_metrics(started, last=3, cpu="another processor")
    rows = (started / "metrics.jsonl").read_text()
    (started / "metrics.jsonl").write_text(re.sub(r', "seconds": [\d.]+', "", rows))
    older = trained[0] / "checkpoints" / "10"
    result = compared(tmp_path, trained[0], started, older, "--limit", "8")
    assert result["runs"][str(started)]["held_out"] is None and result["runs"][str(older)]["held_out"]["pair"]
    assert result["notes"] == [
        f"{started} has no held-out loss: {started} has no checkpoint yet",
        f"{started} has no seconds in its metrics, so it has no curve by seconds",
        f"{started} has not finished: it is at step 3 of {STEPS}",
        f"the held-out loss of {older} is that of step 10; its metrics end at {STEPS}",
        f"the seconds are of different machines: {trained[0]} on some processor, None, None; {started} on another "
        f"processor, None, None; {older} on some processor, None, None",
    ]
    out = capsys.readouterr().out
    assert all(f"note: {note}" in out for note in result["notes"])


def test_without_a_loss_of_the_first_run_the_curves_remain(trained, tmp_path):
    started = shutil.copytree(trained[1], tmp_path / "started", ignore=shutil.ignore_patterns("checkpoints"))
    result = compared(tmp_path, started, trained[0], "--html", tmp_path / "page.html")
    assert result["held_out"] is None and not any(run["held_out"] for run in result["runs"].values())
    assert result["notes"][1] == f"{started} is the first run, so no other run is compared with its loss"
    assert result["differences"] and (tmp_path / "page.html").read_text().count("<svg") == 2 * 4
    (tmp_path / "started" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="started has no checkpoint yet"):
        compare_main([str(trained[0]), str(started)])


def test_labels_are_compared_by_sequence(tmp_path):
    config = tiny_config("brody_majority", model__depth=1)
    config = replace(config, model=replace(config.model, vocab_size=20))
    paths = []
    for seed in (0, 1):
        paths.append(tmp_path / str(seed))
        LanguageModel(config.model, rough_params(config.model, seed), None, config).save(paths[-1])
    result = compared(tmp_path, *paths, "--limit", "30", "--batch-size", "7")
    pair = result["runs"][str(paths[1])]["held_out"]["pair"]
    own = evaluated(tmp_path, paths[1], "--limit", "30")
    assert result["unit"] == "nats per label" and pair["units"] == 30
    assert pair["value"] == pytest.approx(own["loss"], rel=TOLERANCE["float32"])
    text_run = make_run(tmp_path / "text", "gpt2", steps=(1,))
    with pytest.raises(UserError, match="RUN=.*text is not allowed: it predicts next tokens, and .*0 predicts labels"):
        compare_main([str(paths[0]), str(text_run)])


def test_the_page_logs_nothing_and_requests_nothing(comparison, tmp_path):
    assert browse(comparison.page, tmp_path, "--blink-settings=preferredColorScheme=0") == ([], [])


def test_the_page_is_one_file_with_tables_and_curves(comparison):
    html = comparison.page.read_text()
    tags = re.findall(r"<[^!][^>]*>", html)
    assert not [tag for tag in tags if re.match(r"<(script|img|link|iframe|object|embed|base|form|a)\b", tag)]
    assert "Content-Security-Policy" in html and "url(" not in html[: html.index("</style>")]
    assert html.count("<svg") == 2 * len(runs.AXES) and html.count(" checked>") == 1
    for axis in runs.AXES:
        assert f'id="by-{axis}"' in html and f'class="curves by-{axis}"' in html and f"#by-{axis}:checked" in html
    curves = [html.count(f' stroke="{LIGHT[f"run{number}"]}"') for number in range(3)]  # the third model has none
    assert min(curves[:2]) >= 2 * len(runs.AXES) and not curves[2] and "var(--run2)" in html
    for words in ("model.final_norm", "reference", "95 % interval", "nats per token", "has no metrics"):
        assert words in html
    assert not re.search(r"#0[0-9a-d]0[0-9a-d]0[0-9a-d]", html)  # the placeholder colours are replaced


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["{a}"], "RUN=.*a is not allowed alone: give two runs"),
        (["{a}", "{b}", "{a}"], "RUN=.*a is not allowed twice"),
        (["{a}", "/nowhere"], "/nowhere does not exist: it must be a run's directory"),
        (["{a}", "{b}", "--margin", "0"], "--margin: 0 is not allowed: it must be a finite number above 0"),
        (["{a}", "{b}", "--task-margin", "x"], "--task-margin: x is not allowed"),
        (["{a}", "{b}", "--html", "/"], "--html=/ cannot be written"),
        (["{a}", "{b}", "--json", "/"], "--json=/ cannot be written"),
        (["{a}", "{b}", "--split", "validatoin"], "did you mean 'validation'"),
        (["{a}", "{b}", "--stride", "17"], "stride 17.*at most the sequence length, 16"),
        (["{a}", "{b}", "--workdir", "x"], "--workdir"),
        ([], "required: RUN"),
    ],
)
def test_mistakes_are_one_line(trained, arguments, text, capsys):
    given = [argument.format(a=trained[0], b=trained[1]) for argument in arguments]
    with pytest.raises(SystemExit) as stopped:
        command.run(compare_main, given)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code == 2 and error.startswith("error: ") and re.search(text, error), error


def test_evaluate_names_the_new_command():
    for arguments in (["--compare", "runs/a", "runs/b", "--tasks=piqa"], ["--compare=runs/a"]):
        with pytest.raises(UserError, match="--compare .*: python -m xfresearch.compare DIR DIR"):
            evaluate.main(arguments)


@pytest.mark.long
def test_two_processes_compare_as_one(trained, tmp_path):
    alone = compared(tmp_path, *trained)
    done = Processes(2, "xfresearch.compare", *map(str, trained), f"--json={tmp_path}/two.json").succeed()
    assert "these runs" in done[0][1] and not done[1][1]  # only process 0 prints
    both = json.loads((tmp_path / "two.json").read_text())
    one, two = (actual["runs"][str(trained[1])]["held_out"]["pair"] for actual in (alone, both))
    assert two["units"] == one["units"] and two["difference"] == pytest.approx(one["difference"], rel=1e-4)


def test_from_python_it_is_the_comparison_of_the_command(trained, tmp_path):
    compared = xf.compare([xf.Run(trained[0]), trained[1]], limit=8, margin=0.5)
    first, second = compared.table
    assert second["difference"] == pytest.approx(second["loss"] - first["loss"]) and first["verdict"] is None
    assert second["low"] < second["difference"] < second["high"] and "paired over" in str(compared)
    assert f"{second['difference']:+.4f}" in repr(compared) and "Held-out loss" in check(compared)
    assert compared.report(tmp_path / "page.html").read_text().count("<svg") > 2 and len(compared.groups) == 2
    for given, options, said in ((trained[:1], {}, "alone"), (trained, {"limit": -1}, "limit"), ([5, 6], {}, "5 does not")):
        with pytest.raises(UserError, match=said):
            xf.compare(given, **options)
