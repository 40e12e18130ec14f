"""Files of exported folders: whole or not at all, and nothing that is not the model's."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

import xfresearch as xf
from tests.data import made_tokenizers as made
from tests.interop.edits import edit_config
from tests.tiny_runs import tiny_model
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.interop import exporting


@pytest.fixture(scope="module")
def gpt2():
    return tiny_model("gpt2")


def test_a_failed_export_leaves_nothing(gpt2, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    for broken in ("gather", "_write_others"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            patch.setattr(exporting, broken, fail)
            gpt2.export_hf(tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(gpt2, tmp_path):
    (tmp_path / "empty").mkdir()
    gpt2.export_hf(tmp_path / "empty")
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "empty").iterdir()}
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "file"):
        with pytest.raises(xf.UserError, match=f"{tmp_path / name} already exists: export to a new directory"):
            gpt2.export_hf(tmp_path / name)
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "empty").iterdir()} == before
    assert (tmp_path / "file").read_text() == "mine"


def test_files_are_cut_at_the_size_that_is_asked_for(gpt2, tmp_path):
    gpt2.export_hf(tmp_path / "a", shard_bytes=20_000)
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    sizes = {file.name: {name: tensor.nbytes for name, tensor in load_file(file).items()} for file in files}
    assert len(files) > 5 and all(sum(held.values()) <= 20_000 or len(held) == 1 for held in sizes.values())
    assert index["weight_map"] == {tensor: file for file, held in sizes.items() for tensor in held}
    assert index["metadata"]["total_size"] == sum(sum(held.values()) for held in sizes.values())


def test_a_dtype_that_cannot_hold_a_value_is_refused_with_the_tensor(tmp_path):
    lm = tiny_model("gpt2")
    lm.params["embed"]["table"] = lm.params["embed"]["table"].at[3, 4].set(1e5)
    with pytest.raises(xf.UserError, match="tensor transformer.wte.weight has values beyond what float16 holds"):
        lm.export_hf(tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == []
    lm.export_hf(tmp_path / "out", dtype="bfloat16")
    with pytest.raises(xf.UserError, match="dtype='int8' is not allowed: it must be one of float16, bfloat16"):
        lm.export_hf(tmp_path / "other", dtype="int8")


def test_infinite_values_are_written_as_they_are(tmp_path):
    lm = tiny_model("gpt2")
    lm.params["embed"]["table"] = lm.params["embed"]["table"].at[3, 4].set(-np.inf).at[5, 6].set(np.nan)
    lm.export_hf(tmp_path / "out", dtype="float16")
    table = load_file(tmp_path / "out" / "model.safetensors")["transformer.wte.weight"]
    assert table[3, 4] == -np.inf and np.isnan(table[5, 6])


def test_what_no_family_has_is_refused_with_the_nearest(tmp_path):
    lm = tiny_model("all_attention")
    with pytest.raises(xf.UserError, match="no family can express this model: "):
        lm.export_hf(tmp_path / "out")
    with pytest.raises(xf.UserError, match="gpt2 cannot express this model: "):
        lm.export_hf(tmp_path / "out", family="gpt2")
    with pytest.raises(xf.UserError, match="model_type='gtp2' is not allowed.*did you mean 'gpt2'"):
        lm.export_hf(tmp_path / "out", family="gtp2")
    assert list(tmp_path.iterdir()) == []


def test_a_changed_model_is_not_its_folders_any_more(tmp_path):
    """Its family is asked again: what no longer fits is refused, not left out."""
    tiny_model("gpt2").export_hf(tmp_path / "a")
    lm = xf.load(tmp_path / "a")
    block = lm.config.blocks["main"]
    lm.config = replace(lm.config, blocks={"main": replace(block, attention=replace(block.attention, window=8))})
    with pytest.raises(xf.UserError, match="attention.window=8"):
        lm.export_hf(tmp_path / "b", family="gpt2")


def test_a_model_exported_as_another_family_has_nothing_of_the_first(tmp_path):
    """Mistral without windows is Llama: names and keys of the folder it came from are left behind."""
    tiny_model("llama").export_hf(tmp_path / "llama", dtype="bfloat16")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pretraining_tp": 1, "dtype": "bfloat16"}))
    lm = xf.load(tmp_path / "llama")
    lm.export_hf(tmp_path / "mistral", family="mistral")
    lm.export_hf(tmp_path / "again", dtype="float32")
    mistral, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("mistral", "again"))
    assert mistral["model_type"] == "mistral" and mistral["torch_dtype"] == "bfloat16"
    assert "pretraining_tp" not in mistral and again["pretraining_tp"] == 1 and again["dtype"] == "float32"


def test_what_ends_a_text_is_said_of_the_tokenizer_that_is_written(tmp_path):
    """Not left to a family's own numbers: Llama's texts end at 2, which is any word here."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    said = lambda name: [json.loads((tmp_path / name / "config.json").read_text())[key] for key in keys]  # noqa: E731
    lm = tiny_model("llama")
    lm.export_hf(tmp_path / "bytes")
    lm.tokenizer = None
    lm.export_hf(tmp_path / "none")
    made.write(tmp_path / "made", {"tokenizer.json": made.byte_level()})
    lm = xf.load(tmp_path / "bytes")
    lm.tokenizer = load_tokenizer(tmp_path / "made")
    lm.export_hf(tmp_path / "other")
    assert (said("bytes"), said("none"), said("other")) == ([None, 256, None], [None] * 3, [None, 0, None])
    config = json.loads((tmp_path / "other" / "tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}


def test_what_ends_a_text_stays_what_the_folder_says(tmp_path):
    tiny_model("llama").export_hf(tmp_path / "a")
    edit_config(tmp_path / "a", eos_token_id=[7, 8])
    xf.load(tmp_path / "a").export_hf(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == [7, 8]
