"""python -m xfresearch.analyze: files, curves over training, the list, and one-line errors."""

import json
import re
import warnings

import numpy as np
import pytest

from tests.contracts.variants import ALL, NAMED, random_params
from tests.daily import daily
from tests.tiny_runs import make_run, tiny_model
from xfresearch import LanguageModel, analysis, analyze
from xfresearch.analysis.registry import ANALYSES
from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.pages.colours import DARK, LIGHT
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.tables import PLUS_MINUS

DAILY = ("gpt2", "moe")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "notes.txt").write_text("".join(f"line {number} <b>&</b>\n" for number in range(400)))
    return f"text_files:{folder}/notes.txt"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, corpus):
    return make_run(tmp_path_factory.mktemp("run") / "a", data__corpus=f"('{corpus}',)", evaluation__split="train")


def test_it_writes_data_pictures_and_a_report(workdir, capsys):
    analyze.main(["attention", "--workdir", str(workdir), "--count", "3", "--json", str(workdir / "attention.json")])
    out, err = capsys.readouterr()
    assert re.search(r"figure +value +\+-\n", out) and out.count(PLUS_MINUS) == 1
    assert "Induction" in out and "report.html" in err
    target = workdir / "analysis" / "attention"
    written = json.loads((target / "data.json").read_text())
    assert written["analysis"] == "attention" and written["step"] == 20 and "3 rows of" in written["about"]
    assert json.loads((workdir / "attention.json").read_text()) == written
    arrays = np.load(target / "arrays.npz")
    of_lm = analysis.attention(analyze.opened(analyze.parse(["attention", "--workdir", str(workdir)])), count=3)
    for name, value in of_lm.data.items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-5, atol=1e-6)
    page = (target / "report.html").read_text()
    assert "default-src 'none'" in page and not re.findall(r'(?:src|href)="', page)
    assert page.count("<svg") == len(of_lm.pictures) and "Strongest heads" in page
    picture = (target / "picture_0.svg").read_text()
    assert len(list(target.glob("figure_*.pdf"))) == len(list(target.glob("figure_*.png"))) == len(of_lm.pictures)
    assert picture.startswith("<svg") and LIGHT["model"] in picture and DARK["model"] in picture


def test_every_step_gives_curves(workdir, capsys):
    also = workdir / "norms.json"
    flags = ["--step", "all", "--count", "2", "--sequence-length", "16", "--json", str(also)]
    analyze.main(["norms", "--workdir", str(workdir), *flags])
    assert [written["step"] for written in json.loads(also.read_text())] == [10, 20]
    series = json.loads((workdir / "analysis" / "norms" / "series.json").read_text())
    assert [point[0] for point in series["angle of queries"]] == [10, 20]
    assert "Over training" in (workdir / "analysis" / "norms" / "report.html").read_text()


def test_the_list_says_which_analyses_apply(workdir, capsys):
    analyze.main(["--list", "--workdir", str(workdir)])
    out = capsys.readouterr().out
    assert re.search(r"attention .* yes", out) and re.search(r"routing .* the model has no mixture of experts", out)
    analyze.main(["--list"])
    out = capsys.readouterr().out
    assert all(name in out for name in ANALYSES)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["attenton"], "analysis 'attenton' is not allowed.*did you mean 'attention'"),
        (["routing"], "routing does not apply to .*: the model has no mixture of experts"),
        (["attention", "--step", "last"], "--step=last is not allowed: it must be a number or all"),
        (["attention", "--step", "15"], "no checkpoint of step 15"),
        (["attention", "--count", "0"], "at least 1"),
        (["attention", "--data", "nothing"], "nothing"),
        (["attention", "--sequence-length", "1000000"], "1000000"),
        (["patching"], "patching needs --clean TEXT and --corrupted TEXT"),
        (["attention", "--source", "a"], "--source needs --text with attention: the target of each source"),
        (["attention", "--source", "a", "--text", "b"], "source is not allowed: this model has no encoder"),
        (["trace", "--text", "b"], "--text is not allowed with trace: it stands for the rows of a corpus"),
        (["attention", "--clean", "a"], "--clean is not allowed with attention: it is a flag of patching"),
        (["patching", "--clean", "a", "--corrupted", "b", "--count", "3"], "--count is not allowed with patching: "),
        (["attention", "--text", "ab", "--count", "3"], "--count is not allowed with --text: the texts are the rows"),
        (["attention", "--text", "ab", "--sequence-length", "3"], "--sequence-length is not allowed with --text: "),
        (["lens", "--tap", "embed"], "--tap is not allowed with lens: it is a flag of features"),
        (["norms", "--steps", "3"], "--steps is not allowed with norms: it is a flag of features, tuned_lens"),
        (["features", "--tap", "blocks.0.atention.out"], "no such value; did you mean 'blocks.0.attention.out'"),
        (["features", "--tap", "blocks.*.out"], "must match one tap, as 'blocks.0.attention.out' does, and matches 4"),
        (["features", "--tap", "blocks.0.attention.weights"], "must be a vector of each token"),
        (["features", "--target", "embed"], "target='embed' is not allowed: it must be computed after tap="),
        (["features", "--sizes", "8", "32"], "k=16 is not allowed: .* at most the smallest size, 8"),
        (["lens", "--corpora", "x"], "--corpora is not allowed with lens: it is a flag of routing"),
        (["patching", "--clean", "ab", "--corrupted", "a"], "both must be one row of equally many tokens"),
        (["patching", "--clean", "ab", "--corrupted", "ab"], "both prompts have the same logits"),
        (["patching", "--clean", "ab", "--corrupted", "ac", "--answers", "d", "ef"], "'ef' is not allowed: .* one token"),
        (["patching", "--clean", "ab", "--corrupted", "ac", "--answers", "d", "d"], "must be two different tokens"),
        (["patching", "--clean", "ab", "--corrupted", "ac", "--receiver", "x"], "receiver='x' is not allowed: "),
        ([], "NAME and --workdir are required"),
    ],
)
def test_mistakes_are_one_line(workdir, arguments, words):
    with pytest.raises(UserError, match=words) as caught:
        analyze.main([*arguments, "--workdir", str(workdir)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file, flags", [("norms", ()), ("notes", ("--to", "notes"))])
def test_a_directory_that_cannot_be_written_is_an_error_before_the_work(file, flags, tmp_path, monkeypatch):
    make_run(tmp_path / "run", steps=(10,))
    (tmp_path / "run" / "analysis").mkdir()
    for name in ("notes", "run/analysis/norms"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(analyze, "opened", None)
    with pytest.raises(UserError, match=f"^--{'to' if flags else 'workdir'}=.*{file}/data.json cannot be written: "):
        analyze.main(["norms", "--workdir", "run", *flags])


def test_of_every_step_but_the_last_only_figures_are_kept(workdir, monkeypatch):
    written = []
    monkeypatch.setattr(analyze, "write", lambda target, results: written.extend(results))
    analyze.main(["attention", "--workdir", str(workdir), "--step", "all", "--count", "1"])
    first, last = written
    assert last.pictures and "entropy" in last.data
    assert not first.pictures and not any(map(np.ndim, first.data.values())) and first.as_dict()["step"] == 10


def test_texts_of_pairs(tmp_path, capsys):
    make_run(tmp_path / "pairs", "tasks/reverse", steps=(10,), source_length=24, sequence_length=24)
    workdir = ["--workdir", str(tmp_path / "pairs")]
    analyze.main(["attention", *workdir, "--source", "abc", "hello", "--text", "cba", "olleh"])
    out = capsys.readouterr().out
    assert "encoder: Entropy" in out and "cross: Next token" in out
    arrays = np.load(tmp_path / "pairs" / "analysis" / "attention" / "arrays.npz")
    assert arrays["cross/pattern"].shape == (2, 4, 4, 4) and arrays["encoder/entropy_rows"].shape == (2, 2, 4)
    with pytest.raises(UserError, match="must be one row of equally many tokens"):
        analyze.main(["patching", *workdir, "--source", "abc", "ab"])


def test_flags_of_features_are_its_arguments():
    flags = ["--tap", "embed", "--target", "final", "--sizes", "64", "32", "--k", "4", "--steps", "9", "--count", "2"]
    options = analyze.parse(["features", "--workdir", "x", *flags])
    expected = {"tap": "embed", "target": "final", "sizes": [64, 32], "k": 4, "steps": 9, "count": 2}
    assert analyze.settings(options, ANALYSES["features"]) == expected


def test_a_folder_of_another_format_needs_a_place_for_the_results(tmp_path):
    tiny_model("gpt2").export_hf(tmp_path / "folder")
    with pytest.raises(UserError, match="--to is required"):
        analyze.main(["norms", "--workdir", str(tmp_path / "folder")])


TRAINED: dict[str, dict] = {"features": {"sizes": (32,)}, "tuned_lens": {}}  # they train, and more arguments
CASES = [(analysis, config) for config in sorted(NAMED) for analysis in ANALYSES]


def is_daily(name: str, config: str) -> bool:
    """Causal tracing and patching take long, and have tests of their figures."""
    return config in DAILY and (name == "routing" or config == "gpt2") and name not in ("patching", "trace")


@pytest.mark.parametrize("name, config", daily([case for case in CASES if is_daily(*case)], CASES))
def test_every_analysis_runs_on_every_named_config_or_says_why_not(name, config):
    lm = tiny_model(config)
    length = min(lm.run.sequence_length, 24)
    tokens_NL = np.random.default_rng(0).integers(lm.config.vocab_size, size=(2, length))
    if reason := ANALYSES[name].applies(lm.config):
        assert len(reason) > 10
        return
    if ANALYSES[name].prompts:
        result = ANALYSES[name].run(lm, tokens_NL[:1, :6], tokens_NL[1:, :6], answers=(1, 2))
    elif name == "trace":
        answer = int(np.asarray(lm("Aa is"))[0, -1].argmax())
        with pytest.MonkeyPatch.context() as patch:  # the model knows no fact: its own prediction is one
            patch.setattr("xfresearch.analysis.prompts.target_tokens", lambda *_: (answer,))
            result = analysis.trace(lm, [Record("Aa", "{} is", "b")] * 2, samples=1)
    elif name == "recall":
        result = analysis.recall(lm, [Fact("Aa", "r", "Bb", ("Aa is", "so Aa is"), ("what Aa is",))] * 2)
    elif name in TRAINED:
        result = ANALYSES[name].run(lm, tokens_NL, steps=2, training=tokens_NL, **TRAINED[name])
    else:
        result = ANALYSES[name].run(lm, tokens_NL)
    finite = {name: np.isfinite(value) for name, (value, _) in result.summary.items() if "correlation" not in name}
    assert finite and all(finite.values())
    assert all("<svg" in svg for svg in result.elements().values())


@pytest.mark.parametrize("name", ["attention", "norms", "routing"])
def test_layers_without_the_value_are_not_a_number_and_no_warning(name):
    config = ALL["pattern" if name == "routing" else "memory-layers"]
    lm = LanguageModel(config, random_params(config), None, tiny_model("gpt2").run)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        result = ANALYSES[name].run(lm, np.random.default_rng(0).integers(config.vocab_size, size=(3, 12)))
    values = result.data["load" if name == "routing" else "entropy" if name == "attention" else "hidden_keys"]
    assert np.isnan(values).any() and np.isfinite(values).any()
