"""No control character of others reaches a terminal or a page, whatever command prints it."""

import importlib
import json
import re
import shutil
import sys

import pytest

from tests.data import made_tokenizers as made
from tests.tiny_runs import ROOT, make_run, tiny_model
from xfresearch.pages.html import page
from xfresearch.runtime import command, terminal
from xfresearch.runtime.terminal import Filtered, one_line, visible

HOSTILE = "a\x1b[2J\x07\r\x7f\x9b31m\u202eb\u2066c\u2028"
CONTROL = re.compile(r"[^\n\t -~\xa0-\U0010ffff]|[\u200e\u200f\u061c\u2028-\u202e\u2066-\u2069]")
SLOW = ("evaluate", "compare")  # compile
COMMANDS = ("analyze", "compare", "convert", "edit", "evaluate", "generate", "plan", "study", "train")
GPT2 = f"--config={ROOT}/configs/gpt2.py:tiny"


def printed(capsys, name: str, *arguments: str) -> tuple[str, int]:
    """What a command prints, and its exit code."""
    main = importlib.import_module(f"xfresearch.{name}").main
    code = 0
    try:
        command.run(main, list(arguments))
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr()
    return shown.out + shown.err, code


def test_visible():
    assert visible("a\tb\nc\x00\x1b\r\x7f") == "a\tb\nc\u2400\u241b\u240d\u2421"
    assert visible("\x9b\u202e\u2028 \u00e9\u4e2d\u0627") == "\\x9b\\u202e\\u2028 \u00e9\u4e2d\u0627"
    assert one_line("a\n  error: b\tc\x1b") == "a error: b c\u241b"
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not CONTROL.search(visible(every)) and visible(visible(every)) == visible(every)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    "arguments",
    [
        [f"--workdir={HOSTILE}"],
        [f"--{HOSTILE}=1"],
        [HOSTILE],
        [f"--config={HOSTILE}.py:{HOSTILE}", f"--workdir={HOSTILE}"],
        [GPT2, f"--workdir={HOSTILE}", f"--config.{HOSTILE}=1"],
        [GPT2, f"--workdir={HOSTILE}", f"--config.data.corpus=('text_files:{HOSTILE}',)", f"--config.steps={HOSTILE}"],
    ],
    ids=range(6),
)
def test_a_mistake_with_hostile_arguments_is_one_clean_line(capsys, monkeypatch, tmp_path, name, arguments):
    monkeypatch.chdir(tmp_path)
    text, code = printed(capsys, name, *arguments)
    assert code == 2 and text.startswith("error: ") and text.count("\n") == 1
    assert not CONTROL.search(text), CONTROL.search(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in a directory with a hostile name, in a corpus, a config and metrics with hostile names and keys."""
    folder = make_run(tmp_path_factory.mktemp("terminal") / HOSTILE, steps=(10, 20))
    (folder.parent / f"{HOSTILE}.txt").write_text(f"words {HOSTILE} of a text\n" * 200)
    rows = [{"step": step, "kind": "evaluation", HOSTILE: 1.0, "loss": 2.0, "bits_per_byte": 3.0} for step in (1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", ["generate", "convert", *(pytest.param(n, marks=pytest.mark.long) for n in SLOW)])
def test_results_with_hostile_names_and_samples_are_clean(capsys, run, tmp_path, monkeypatch, name):
    monkeypatch.setenv("XFRESEARCH_CACHE", str(tmp_path / "cache"))
    text = f"text_files:{run.parent}/{HOSTILE}.txt"
    collected = {
        "generate": ["--workdir", str(run), "--prompt", f"x{HOSTILE}", "--max-new-tokens=30", "--temperature=5"],
        "evaluate": ["--workdir", str(run), "--data", text, "--sequence-length=16", "--limit=4"],
        "compare": [f"{run}/checkpoints/10", str(run), "--html", str(tmp_path / "compare.html")],
        "convert": ["export", str(run), str(tmp_path / HOSTILE)],
    }
    output, code = printed(capsys, name, *collected[name])
    assert code == 0 and "\u241b" in output, output
    assert not CONTROL.search(output), CONTROL.search(output)
    if name == "compare":
        assert not CONTROL.search((tmp_path / "compare.html").read_text())


@pytest.mark.parametrize(
    "file, content",
    [
        ("config.json", {HOSTILE: 1}),
        ("config.json", {"model": {"blocks": {HOSTILE: {"layout": HOSTILE}}}}),
        ("config.json", {"data": {"tokenizer": HOSTILE}, "steps": HOSTILE}),
        ("huggingface.json", {HOSTILE: HOSTILE}),
        ("tokenizer/tokenizer.json", {"model": {"type": HOSTILE}}),
        ("metrics.jsonl", [HOSTILE]),
    ],
)
def test_a_damaged_run_with_hostile_content_is_one_clean_line(capsys, run, tmp_path, file, content):
    folder = shutil.copytree(run, tmp_path / HOSTILE)
    shutil.rmtree(folder / "tokenizer")
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(json.dumps(content) + "\n")
    name = "compare" if file == "metrics.jsonl" else "generate"
    arguments = [str(folder)] * 2 if name == "compare" else [f"--workdir={folder}", "--prompt=a"]
    text, code = printed(capsys, name, *arguments)
    assert code == 2 and text.count("\n") == 1 and not CONTROL.search(text), text


def test_hostile_names_of_a_hugging_face_folder_are_clean(capsys, tmp_path):
    tiny_model().export_hf(tmp_path / "model")
    tokenizer = json.loads(made.byte_level())
    for key, value in {"model_type": HOSTILE, "hidden_size": HOSTILE, "architectures": [HOSTILE]}.items():
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {key: value}))
        (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer | {HOSTILE: HOSTILE}))
        text, code = printed(capsys, "generate", f"--workdir={tmp_path}/model", "--prompt=a")
        assert code == 2 and text.count("\n") == 1 and not CONTROL.search(text), text


def test_a_page_is_clean_and_a_bug_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (tmp_path / "a.jinja").write_text("<p>{{ name }}{{ html }}</p>")
    text = page(tmp_path / "a.jinja", name=HOSTILE, html=HOSTILE).decode()
    assert not CONTROL.search(text)

    def main(arguments):
        print("a title", HOSTILE)
        raise ZeroDivisionError(HOSTILE)

    with pytest.raises(ZeroDivisionError) as raised:
        command.run(main, [])
    sys.excepthook(raised.type, raised.value, raised.tb)  # as Python does at the end
    shown = capsys.readouterr()
    assert shown.out.count("\u241b") == shown.err.count("\u241b") == 1 and "Traceback" in shown.err
    assert not CONTROL.search(shown.out + shown.err)


def test_progress_bars_go_past_the_filter_with_a_clean_title(capsys):
    with terminal.filtered():
        assert isinstance(sys.stderr, Filtered) and isinstance(sys.stdout, Filtered)
        with terminal.bar(range(2), desc=HOSTILE) as bar:
            list(bar)
    shown = capsys.readouterr().err
    assert "\r" in shown and not CONTROL.search(shown.replace("\r", "")) and "a\u241b" in shown


def test_progress_bars_are_made_in_one_place():
    """One of another place would be filtered, or have a title that is not."""
    found = [path.name for path in sorted((ROOT / "xfresearch").rglob("*.py")) if re.search(r"\btqdm\(", path.read_text())]
    assert found == ["terminal.py"]
