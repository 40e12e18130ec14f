"""The generate command: its output on standard output and standard error, and one-line errors."""

import json
import re
import subprocess
import sys
import time

import jax
import pytest

from tests.contracts.variants import random_params
from tests.tiny_runs import ROOT, make_run, tiny_config
from xfresearch import evaluate, generate
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.loading import loading
from xfresearch.loading.language_model import LanguageModel
from xfresearch.options.run_options import DataConfig
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a", "gpt2")


def test_text_goes_to_standard_output_and_the_rate_to_standard_error(run, capsys):
    generate.main(["--workdir", str(run), "--prompt", "def main(", "--max-new-tokens", "40", "--seed", "3"])
    out, err = capsys.readouterr()
    assert out == "def main(" + loading.load(run).generate("def main(", 40, seed=3) + "\n"
    assert re.fullmatch(rf"{re.escape(str(run))}: step 20\n\d+ tokens, the first after [\d.]+ s, then \d+ tokens/s\n", err)


@pytest.mark.parametrize("main, options", [(generate.main, []), (evaluate.main, ["--distributed=off"])])
def test_compiled_programs_are_saved_in_the_users_cache(tmp_path, monkeypatch, main, options):
    """Not in the cache that the run's config names: a cached program there could do anything.

    The command sets the folder before the first compilation, because JAX reads the setting only once.
    """
    run = make_run(tmp_path / "a", "gpt2", data__cache_dir=str(tmp_path / "theirs"), data__manual_dir="theirs")
    assert loading.run_config(run).data == DataConfig()
    monkeypatch.setenv("XFRESEARCH_CACHE", str(tmp_path / "ours"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    folders = []
    monkeypatch.setattr(loading, "load", lambda *_: folders.append(jax.config.jax_compilation_cache_dir) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["--workdir", str(run), *options])
    assert folders == [str(tmp_path / "ours" / "compiled")]


def test_several_prompts_are_labelled_and_written_as_json(run, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("class A:\n")
    options = ["--prompt", "a", "--prompt", "", "--prompt-file", str(tmp_path / "p.txt"), "--step", "10"]
    settings = {"max_new_tokens": 20, "temperature": 1.5, "top_k": 30, "top_p": 0.9, "seed": 4}
    options += [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    generate.main(["--workdir", str(run), *options, "--json", str(tmp_path / "deep" / "out.json")])
    prompts = ["a", "", "class A:\n"]
    texts = loading.load(run, 10).generate(prompts, **settings)
    out = capsys.readouterr().out
    pieces = [f"--- prompt {i} of 3 ---\n{p}{t}" for i, (p, t) in enumerate(zip(prompts, texts, strict=True), 1)]
    assert out == "\n\n".join(pieces) + "\n"
    result = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert [(s["prompt"], s["text"]) for s in result["samples"]] == list(zip(prompts, texts, strict=True))
    assert result["step"] == 10 and result["temperature"] == 1.5 and result["seconds_to_first"] > 0
    assert all(0 < s["tokens"] <= 20 for s in result["samples"])


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory):
    config = tiny_config("tasks/sort")
    lm = LanguageModel(config.model, random_params(config.model), ByteTokenizer(), config)
    directory = tmp_path_factory.mktemp("runs") / "pairs"
    lm.save(directory)
    return directory


def test_sources_are_decoded_with_beams_without_a_temperature(of_pairs, tmp_path, capsys):
    (tmp_path / "s.txt").write_text("cab")
    options = ["--source", "hello", "--source-file", str(tmp_path / "s.txt"), "--prompt", "a", "--max-new-tokens", "6"]
    options += ["--beams", "2", "--length-penalty", "0.5", "--json", str(tmp_path / "out.json")]
    generate.main(["--workdir", str(of_pairs), *options])
    texts = loading.load(of_pairs).generate(
        "a", 6, source=["hello", "cab"], beams=2, length_penalty=0.5, temperature=0.0
    )
    out = capsys.readouterr().out
    assert out == f"--- source 1 of 2 ---\na{texts[0]}\n\n--- source 2 of 2 ---\na{texts[1]}\n"
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(s["source"], s["prompt"], s["text"]) for s in result["samples"]] == [
        ("hello", "a", texts[0]),
        ("cab", "a", texts[1]),
    ]
    assert (result["beams"], result["length_penalty"], result["temperature"]) == (2, 0.5, 0.0)


def test_settings_of_generation_have_flags(of_pairs, tmp_path, capsys):
    given = {"no_repeat_ngram_size": 2, "min_length": 4, "repetition_penalty": 1.5, "bad_words_ids": [[24], [98, 99]]}
    search = {"early_stopping": "never", "length_penalty": 2.0}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (given | search).items()]
    options = ["--workdir", str(of_pairs), "--source", "hello", "--max-new-tokens", "6", "--beams", "2"]
    generate.main([*options, *words, "--json", str(tmp_path / "out.json")])
    how = {"source": "hello", "max_new_tokens": 6, "beams": 2, "temperature": 0.0}
    lm = loading.load(of_pairs)
    out, text = capsys.readouterr().out, lm.generate(**how, **given, **search)
    assert out == text + "\n" and text != lm.generate(**how)
    written = json.loads((tmp_path / "out.json").read_text())
    assert {name: written[name] for name in given | search} == given | search
    with pytest.raises(UserError, match="early_stopping='soon' is not allowed: it must be True, False or 'never'"):
        generate.main([*options, "--early-stopping", "soon"])
    with pytest.raises(UserError, match="--min-length is not allowed with --fill"):
        generate.parse(["--workdir", "x", "--fill", "--min-length", "3"])


def test_special_tokens_of_sources_and_targets_are_tokens_once(of_pairs):
    lm = loading.load(of_pairs)
    end = lm.tokenizer.end_of_text
    lm.tokenizer.special_tokens = {"</s>": end}  # bytes have no special token that a text can name
    options = generate.parse(["--workdir", "x", "--special-tokens"])
    assert generate.source_inputs(lm, ["a</s>b", "a</s>", ""], options) == [
        [ord("a"), end, ord("b"), end],
        [ord("a"), end],
        [end],
    ]
    assert list(generate.inputs(lm, ["", "a"], options)) == [[end], [end, ord("a")]]


@pytest.mark.parametrize(
    "options, text",
    [
        ([], "source is missing: this model has an encoder"),
        (["--source", "a", "--beams", "2", "--temperature", "0.5"], "temperature=0.5 is not allowed with beams=2"),
        (["--source", "a", "--beams", "0"], "beams=0"),
        (["--source", "a", "--length-penalty", "2"], "length_penalty=2.0 is not allowed with beams=1"),
        (["--source", "a", "--prompt", "b", "--prompt", "c"], "2 prompts .* one prompt, or one for each of 1 source"),
        (["--source", "a", "--chat"], "--chat is not allowed with --source"),
        (["--source-file", "/nowhere/s.txt"], "--source-file=/nowhere/s.txt: No such file"),
    ],
)
def test_mistakes_with_sources_give_one_line_errors(of_pairs, options, text):
    with pytest.raises(UserError, match=text) as caught:
        generate.main(["--workdir", str(of_pairs), *options])
    assert "\n" not in str(caught.value)


def test_without_a_prompt_the_model_starts_a_new_text(run, capsys):
    generate.main(["--workdir", str(run), "--max-new-tokens", "10", "--temperature", "0"])
    lm = loading.load(run)
    assert capsys.readouterr().out == lm.generate("", 10, temperature=0.0) + "\n"


def test_the_first_text_is_streamed(capsys):
    printer = generate.Printer(["a", "b"])
    printer(0, "x", [1])
    printer(1, "y", [2])
    assert capsys.readouterr().out == "--- prompt 1 of 2 ---\nax"
    printer(0, "z", [3])
    printer.finish()
    assert capsys.readouterr().out == "z\n\n--- prompt 2 of 2 ---\nby\n"


def test_the_rate_excludes_the_chunk_that_waits_for_compilation(monkeypatch):
    clock = iter([0.0, 5.0, 5.0, 6.0, 6.0, 7.0])
    monkeypatch.setattr(generate.time, "perf_counter", lambda: next(clock))
    printer = generate.Printer(["a", "b"])
    for _ in range(2):
        printer(0, "", [1] * 16)
        printer(1, "", [1] * 16)
    printer(1, "", [1] * 16)
    assert printer.timing() == {"seconds_to_first": 5.0, "tokens_per_second": 24.0}


@pytest.mark.parametrize(
    "options, text",
    [
        (["--temperature", "-1"], "temperature=-1.0.* at least 0"),
        (["--temperature", "hot"], "--temperature: .*'hot'"),
        (["--temperature", "nan"], "temperature=nan"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--top-p", "1.5"], "top_p=1.5"),
        (["--top-k", "-1"], "top_k=-1"),
        (["--seed", "-1"], "seed=-1"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--prompt", "a" * 60, "--max-new-tokens", "5"], "at least 1 and at most 4"),
        (["--prompt", "a" * 70], "a prompt of 70 tokens.*position table"),
        (["--step", "x"], "argument --step: x is not allowed: it must be an integer of at least 0"),
        (["--step", "15"], "no checkpoint of step 15: it has steps 10, 20"),
        (["--prompt-file", "/nowhere/p.txt"], "--prompt-file=/nowhere/p.txt: No such file"),
        (["--json", "/"], "--json=/ cannot be written"),
        (["--fill", "--max-new-tokens", "5"], "--max-new-tokens is not allowed with --fill: "),
        (["--fill", "--temperature", "0", "--top-k", "3"], "--temperature is not allowed with --fill: "),
        (["--promt", "a"], "--promt"),
        (["--source", "a"], r"source is not allowed: this model has no encoder \(model.stacks\)"),
    ],
)
def test_mistakes_give_one_line_errors(run, options, text):
    with pytest.raises(UserError, match=text) as caught:
        generate.main(["--workdir", str(run), *options])
    assert "\n" not in str(caught.value)


def test_a_prompt_file_is_read_without_changes(tmp_path):
    (tmp_path / "p.txt").write_bytes("a\r\nnä\n".encode())
    assert generate.read_text("--prompt-file", str(tmp_path / "p.txt")) == "a\r\nnä\n"


def test_the_error_for_a_prompt_that_is_not_utf8_names_file_and_byte(run, tmp_path):
    (tmp_path / "p.txt").write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"p\.txt: not UTF-8 at byte 3"):
        generate.main(["--workdir", str(run), "--prompt-file", str(tmp_path / "p.txt")])


def test_a_directory_that_is_not_a_run_exits_with_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.run(generate.main, ["--workdir", str(tmp_path / "none"), "--prompt", "a"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["generate", "evaluate", "convert"])
def test_help_does_not_import_jax(name):
    begin = time.perf_counter()
    arguments = [sys.executable, "-X", "importtime", "-m", f"xfresearch.{name}", "--help"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    assert done.returncode == 0 and "examples:" in done.stdout
    assert not re.search(r"\| +(jax|numpy|flax|orbax)\b", done.stderr)
    assert seconds < 5  # under 1 s on an idle machine
