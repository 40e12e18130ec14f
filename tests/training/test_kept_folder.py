"""A Hugging Face folder that is trained on, resumed, trained on again and exported has all that it brought."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

import xfresearch as xf
from tests.field.test_field import FOLDER
from tests.interop.edits import WEIGHTS
from tests.interop.folders import tensors
from tests.interop.test_prompts import SETTINGS, TEMPLATE
from tests.tiny_runs import rough_params, tiny_model
from tests.training.test_pretrained import flags
from xfresearch.checkpoints import store
from xfresearch.convert import main as convert_main
from xfresearch.interop import source
from xfresearch.train import main as train_main
from xfresearch.training import session

MAY_DIFFER = {WEIGHTS}  # in its numbers, not in its names, shapes and dtypes
LEFT_OUT = {"README.md", "training_args.bin"}  # they describe the model that was trained on, or are of another program
FILES = {
    "special_tokens_map.json": json.dumps({"bos_token": {"content": "<|endoftext|>", "lstrip": False}}, indent=3),
    "added_tokens.json": '{"<|endoftext|>": 259}\n\n',
    "generation_config.json": '{"temperature":0.6,  "eos_token_id": [259, 261], "no_repeat_ngram_size": 2}',
    "README.md": "# a model\n",
    "training_args.bin": "pickle",
}
TEMPLATES = {  # in both places; the file counts first
    "chat_template.jinja": TEMPLATE,
    "tokenizer_config.json": json.dumps(SETTINGS | {"chat_template": "{{ messages[0].content }}"}, indent=1) + "\r\n",
}


def make_folder(path: Path) -> Path:
    lm = tiny_model("llama")
    lm.config, lm.tokenizer = replace(lm.config, vocab_size=264), None
    lm.params = rough_params(lm.config)
    lm.export_hf(path, dtype="bfloat16")
    shutil.copy(FOLDER / "files" / "tokenizers" / "of_2020" / "tokenizer.json", path)
    for name, content in (FILES | TEMPLATES).items():
        (path / name).write_bytes(content.encode())
    config = json.loads((path / "config.json").read_text()) | {"task_specific_params": {"a": 1}, "eos_token_id": 259}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return path


def test_a_trained_folder_is_exported_with_every_file(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "draw_samples", lambda *_: [])
    folder = make_folder(tmp_path / "folder")
    first = flags(tmp_path, folder, "first")
    train_main(first)
    shutil.rmtree(store.directory(tmp_path / "first") / "4")
    moved = folder.rename(tmp_path / "moved")
    train_main(first)  # resumes without the folder
    train_main(flags(tmp_path, tmp_path / "first" / "checkpoints" / "4", "second"))
    xf.load(tmp_path / "second").save(tmp_path / "saved")
    convert_main(["export", str(tmp_path / "saved"), str(tmp_path / "out")])
    before, after = ({file.name: file.read_bytes() for file in path.iterdir()} for path in (moved, tmp_path / "out"))
    assert after.keys() == before.keys() - LEFT_OUT
    assert {name for name in after if after[name] != before[name]} == MAY_DIFFER
    old, new = tensors(moved), tensors(tmp_path / "out")
    assert {name: (each.dtype, each.shape) for name, each in new.items()} == {
        name: (each.dtype, each.shape) for name, each in old.items()
    }
    assert sum(not np.array_equal(new[name], old[name]) for name in old) > len(old) / 2, "it was trained"
    trained = xf.load(tmp_path / "second")
    assert trained.chat("the") == xf.load(moved).chat("the") != trained.encode("the")
    (tmp_path / "second" / source.FILES / "chat_template.jinja").unlink()
    assert xf.load(tmp_path / "second").chat("the") == trained.encode("the"), "the template of the settings"


def test_a_run_that_begins_anew_keeps_nothing_of_the_folder_before(tmp_path):
    """A start that made no checkpoint may have begun from another folder, or from new parameters."""
    kept = xf.load(make_folder(tmp_path / "folder")).source
    run = tmp_path / "run"
    source.replace(run, kept)
    (run / source.FILES / "notes.txt").write_text("not ours")
    fewer = source.Source(**vars(kept) | {"files": {"tokenizer.json": b"{}"}})
    source.replace(run, fewer)
    assert source.load(run) == fewer
    source.replace(run, None)
    assert source.load(run) is None and [file.name for file in (run / source.FILES).iterdir()] == ["notes.txt"]
