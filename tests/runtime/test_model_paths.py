"""The name of a model on the Hub in place of a path: every command says how to download it, and which folder that fills."""

import re

import pytest

import xfresearch as xf
from tests.tiny_runs import ROOT
from xfresearch import analyze, convert, edit, evaluate, generate
from xfresearch.compare import main as compare_main
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.runtime.model_paths import if_on_hub, with_models
from xfresearch.train import main as train_main

REQUESTS = ROOT / "tests/field/files/requests/counterfact.json"
TINY = [f"--config={ROOT}/configs/gpt2.py:tiny", "--workdir=new"]
DOORS = {
    "xf.load": lambda name: xf.load(name),
    "load_tokenizer": lambda name: load_tokenizer(name),
    "evaluate": lambda name: evaluate.main(["--workdir", name]),
    "generate": lambda name: generate.main(["--workdir", name, "--prompt=a"]),
    "analyze": lambda name: analyze.main(["norms", "--workdir", name]),
    "analyze --list": lambda name: analyze.main(["--list", "--workdir", name]),
    "edit": lambda name: edit.main(["rome", "--workdir", name, f"--request={REQUESTS}", "--to=new"]),
    "edit --diff": lambda name: edit.main(["--diff", name, "new"]),
    "convert": lambda name: convert.main(["untie", name, "new"]),
    "convert import": lambda name: convert.main(["import", name, "new"]),
    "convert export": lambda name: convert.main(["export", name, "new"]),
    "compare": lambda name: compare_main([name, "new"]),
    "train --start": lambda name: train_main([*TINY, "--start", name]),
    "config.start.path": lambda name: train_main([*TINY, f"--config.start.path={name}"]),
    "config.data.tokenizer": lambda name: train_main([*TINY, f"--config.data.tokenizer={name}"]),
}


@pytest.mark.parametrize("door", DOORS)
def test_the_name_of_a_model_on_the_hub_is_answered_with_its_download(door, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-3.2-1B"
    with pytest.raises(xf.UserError) as caught:
        DOORS[door](name)
    command = f"`hf download {name} --local-dir models/Llama-3.2-1B` fills the folder models/Llama-3.2-1B"
    assert name in str(caught.value) and command in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given, name",
    [
        ("gpt2", "gpt2"),
        ("gpt2/", "gpt2"),
        ("microsoft/phi-1_5", "microsoft/phi-1_5"),
        ("facebook/opt-1.3b", "facebook/opt-1.3b"),
        ("https://huggingface.co/gpt2", "gpt2"),
        ("https://huggingface.co/openai/gpt-oss-20b/tree/main", "openai/gpt-oss-20b"),
        ("hf://google/gemma-3-1b-pt", "google/gemma-3-1b-pt"),
    ],
)
def test_names_and_addresses_of_the_hub_are_recognised(given, name):
    assert f"`hf download {name} --local-dir models/{name.split('/')[-1]}`" in if_on_hub(given)


@pytest.mark.parametrize(
    "given",
    ["/runs/a", "./gpt2", "~/gpt2", "a/b/c", "configs/gtp2", "stories15M.bin", "a.safetensors", "models--a--b", "..", ""],
)
def test_what_can_be_no_name_of_the_hub_is_not_taken_for_one(given, tmp_path, monkeypatch):
    """The owner of a name is no directory that is here: configs/ is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    assert if_on_hub(given) == ""


@pytest.mark.parametrize("read", [xf.load, load_tokenizer])
@pytest.mark.parametrize("address", ["https://huggingface.co/gpt2", "http://a.b/c", "hf://a/b"])
def test_an_address_of_the_web_is_no_path(read, address):
    with pytest.raises(xf.UserError, match=f"^{address} is an address, not a path: "):
        read(address)


@pytest.mark.parametrize(
    "files, said",
    [
        (["checkpoint-500/config.json", "checkpoint-1000/config.json"], "the output of a Trainer: give one of the 2 in it, "
         "such as {}/checkpoint-1000"),
        (["checkpoint-9/adapter_config.json"], "the output of a Trainer: give the model in it, {}/checkpoint-9"),
        (["snapshots/c0/config.json", "refs/main"], "a model in the Hub's cache: give the model in it, {}/snapshots/c0"),
        (["models--a--b/snapshots/c0/config.json", "version.txt"], "the Hub's cache: give the model in it, "
         "{}/models--a--b/snapshots/c0"),
        (["llama/model.safetensors"], "a folder of models: give the model in it, {}/llama"),
        (["a/checkpoints/1/x", "b/checkpoints/1/x"], "a folder of runs: give one of the 2 in it, such as {}/a"),
        (["config.json", "docs/config.json", "a.txt"], ""),
    ],
)  # fmt: skip
def test_a_folder_with_models_in_it_names_them(files, said, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    assert with_models(tmp_path) == said.format(tmp_path)
    if said:
        for read in (xf.load, load_tokenizer):
            with pytest.raises(xf.UserError, match=re.escape(said.format(tmp_path)) + "$"):
                read(tmp_path)
