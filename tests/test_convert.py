"""The convert command: Hugging Face folder to run directory and back, and a one-line error for every mistake."""

import re
import shutil

import numpy as np
import pytest

import xfresearch as xf
from tests.tiny_runs import make_run, tiny_model
from xfresearch import convert, evaluate, generate
from xfresearch.runtime import command
from xfresearch.runtime.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("folders") / "llama"
    tiny_model("llama").export_hf(path, dtype="bfloat16")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a")


def test_import_and_export_reproduce_the_folder(folder, tmp_path, capsys):
    workdir, back = tmp_path / "run", tmp_path / "back"
    convert.main(["import", str(folder), str(workdir), "--dtype", "float32"])
    convert.main(["export", str(workdir), str(back)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line, target in zip(lines, (workdir, back), strict=True):
        summary = r"llama, [\d,]+ parameters, 0\.00 GB in \d+\.\d s \(\d+ MB/s\)"
        assert re.fullmatch(f"{target}: {summary}", line)
    assert {file.name for file in back.iterdir()} == {file.name for file in folder.iterdir()}
    for file in folder.iterdir():
        assert file.read_bytes() == (back / file.name).read_bytes()
    lm = xf.load(workdir)
    assert lm.config.dtype == "float32"
    np.testing.assert_array_equal(lm([[1, 2, 3]]), xf.load(folder, dtype="float32")([[1, 2, 3]]))


def test_export_of_a_step_in_another_dtype_and_in_several_files(run, tmp_path):
    options = ["--step", "10", "--dtype", "float16", "--shard-size", "0.02MB", "--family", "gpt2"]
    convert.main(["export", str(run), str(tmp_path / "out"), *options])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    exported = xf.load(tmp_path / "out")
    lm = xf.load(run, step=10)
    table = np.asarray(lm.params["embed"]["table"]).astype(np.float16)
    np.testing.assert_array_equal(exported.params["embed"]["table"], table)


def test_generate_and_evaluate_read_a_hugging_face_folder(folder, tmp_path, capsys):
    generate.main(["--workdir", str(folder), "--prompt", "def", "--max-new-tokens", "4", "--temperature", "0"])
    assert capsys.readouterr().out == "def" + xf.load(folder).generate("def", 4, temperature=0.0) + "\n"
    (tmp_path / "notes.txt").write_text("a line of text\n" * 2000)
    options = ["--workdir", f"text_files:{tmp_path}/notes.txt", "--sequence-length", "32", "--limit", "4"]
    options = ["--data", *options[1:], "--distributed=off"]
    evaluate.main(["--workdir", str(folder), *options])
    first = capsys.readouterr().out
    convert.main(["import", str(folder), str(tmp_path / "run")])
    capsys.readouterr()
    evaluate.main(["--workdir", str(tmp_path / "run"), *options])
    second = capsys.readouterr().out
    loss = [re.search(r"\n +0 +(\d\.\d+)", text)[1] for text in (first, second)]
    assert loss[0] == loss[1]
    with pytest.raises(UserError, match="--all-steps is not allowed with .*: it has no checkpoints"):
        evaluate.main(["--workdir", str(folder), "--all-steps"])


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["import", "{folder}", "{run}"], "already exists: import to a new directory"),
        (["export", "{run}", "{folder}"], "already exists: export to a new directory"),
        (["import", "{run}", "{new}"], "is a run's directory: it must be a Hugging Face folder"),
        (["import", "{new}", "{new}2"], "does not exist"),
        (["import", "{broken}", "{new}"], "model.safetensors: truncated: tensor"),
        (["import", "{folder}", "{new}", "--dtype", "int8"], "--dtype: .*'int8'"),
        (["import", "{folder}"], "required: WORKDIR"),
        (
            ["export", "{run}", "{new}", "--shard-size", "5TB"],
            "5TB.* a size like 500MB or 5GB",
        ),
        (["export", "{run}", "{new}", "--shard-size", "0"], "--shard-size: 0"),
        (["export", "{run}", "{new}", "--family", "lama"], "model_type='lama'.*did you mean 'llama'"),
        (["export", "{run}", "{new}", "--family", "llama"], "llama cannot express this model: "),
        (["export", "{run}", "{new}", "--step", "15"], "no checkpoint of step 15: it has steps 10, 20"),
        (["exprot", "{run}", "{new}"], "exprot"),
        ([], "import.export"),
    ],
)
def test_mistakes_exit_with_2_and_a_one_line_error(folder, run, tmp_path, capsys, arguments, text):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-5])
    names = {"folder": folder, "run": run, "broken": broken, "new": tmp_path / "new"}
    with pytest.raises(SystemExit) as stopped:
        command.run(convert.main, [argument.format(**names) for argument in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.count("\n") == 1 and error.startswith("error: ") and re.search(text, error), error
    assert not list(tmp_path.glob("new*")) and not list(tmp_path.glob(".*"))


def test_a_stack_and_a_role_are_chosen_on_the_command_line(tmp_path, capsys):
    workdir = str(make_run(tmp_path / "pairs", "tasks/reverse", steps=(10,)))
    convert.main(["--dry-run", workdir])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["merge_query_key"] == "applies"
    assert lines["drop_query"].startswith("applies with --role cross; to all refused: encoder, layer 0, layout='pre_norm'")
    assert lines["feed_forward_to_memory"].startswith("applies with --stack encoder; to all refused: layer 0")
    convert.main(["merge_query_key,untie", workdir, "--dry-run", "--stack", "decoder"])
    assert "merge_query_key, untie: " in capsys.readouterr().out
    with pytest.raises(UserError, match="merge_query_key: layer 0, attention: query='merged' and key='identity_whole'"):
        convert.main(["merge_query_key,merge_query_key", workdir, "--dry-run", "--layers", "0"])
    convert.main(["merge_query_key,factor_query_key", workdir, "--dry-run", "--role", "cross", "--rank", "8"])
    with pytest.raises(UserError, match="role='cross' is not allowed with untie: it must be left out"):
        convert.main(["merge_query_key,untie", workdir, "--dry-run", "--role", "cross"])
    with pytest.raises(UserError, match="--stack: .*'both'"):
        convert.main(["untie", workdir, "--dry-run", "--stack", "both"])
