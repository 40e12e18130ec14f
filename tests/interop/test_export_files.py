"""Files of exported folders: written atomically, and only those of the model."""

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


def test_a_failed_export_leaves_nothing(gpt2, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    for broken in ("gather", "_write_others"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            patch.setattr(exporting, broken, fail)
            gpt2.export_hf(tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_export_does_not_overwrite_anything(gpt2, tmp_path):
    (tmp_path / "empty").mkdir()
    gpt2.export_hf(tmp_path / "empty")
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "empty").iterdir()}
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "file"):
        with pytest.raises(xf.UserError, match=f"{tmp_path / name} already exists: export to a new directory"):
            gpt2.export_hf(tmp_path / name)
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "empty").iterdir()} == before
    assert (tmp_path / "file").read_text() == "mine"


def test_files_are_split_at_the_given_size(gpt2, tmp_path):
    gpt2.export_hf(tmp_path / "a", shard_bytes=20_000)
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    sizes = {file.name: {name: tensor.nbytes for name, tensor in load_file(file).items()} for file in files}
    assert len(files) > 5 and all(sum(held.values()) <= 20_000 or len(held) == 1 for held in sizes.values())
    assert index["weight_map"] == {tensor: file for file, held in sizes.items() for tensor in held}
    assert index["metadata"]["total_size"] == sum(sum(held.values()) for held in sizes.values())


def test_a_value_outside_the_range_of_the_dtype_is_an_error_that_names_the_tensor(tmp_path):
    lm = tiny_model("gpt2")
    lm.params["embed"]["table"] = lm.params["embed"]["table"].at[3, 4].set(1e5)
    with pytest.raises(xf.UserError, match="tensor transformer.wte.weight has values outside the range of float16"):
        lm.export_hf(tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == []
    lm.export_hf(tmp_path / "out", dtype="bfloat16")
    with pytest.raises(xf.UserError, match="dtype='int8'.* one of float16, bfloat16"):
        lm.export_hf(tmp_path / "other", dtype="int8")


def test_infinite_values_are_written_unchanged(tmp_path):
    lm = tiny_model("gpt2")
    lm.params["embed"]["table"] = lm.params["embed"]["table"].at[3, 4].set(-np.inf).at[5, 6].set(np.nan)
    lm.export_hf(tmp_path / "out", dtype="float16")
    table = load_file(tmp_path / "out" / "model.safetensors")["transformer.wte.weight"]
    assert table[3, 4] == -np.inf and np.isnan(table[5, 6])


def test_an_unsupported_model_is_an_error_that_names_the_nearest_family(tmp_path):
    lm = tiny_model("all_attention")
    with pytest.raises(xf.UserError, match="no family can express this model: "):
        lm.export_hf(tmp_path / "out")
    with pytest.raises(xf.UserError, match="gpt2 cannot express this model: "):
        lm.export_hf(tmp_path / "out", family="gpt2")
    with pytest.raises(xf.UserError, match="model_type='gtp2'.*did you mean 'gpt2'"):
        lm.export_hf(tmp_path / "out", family="gtp2")
    assert list(tmp_path.iterdir()) == []


def test_a_model_changed_after_import_is_checked_again(tmp_path):
    """The change does not fit the family that it was imported from, which is an error; it is not dropped."""
    tiny_model("gpt2").export_hf(tmp_path / "a")
    lm = xf.load(tmp_path / "a")
    block = lm.config.blocks["main"]
    lm.config = replace(lm.config, blocks={"main": replace(block, attention=replace(block.attention, window=8))})
    with pytest.raises(xf.UserError, match="attention.window=8"):
        lm.export_hf(tmp_path / "b", family="gpt2")


def test_export_as_another_family_drops_the_keys_of_the_first(tmp_path):
    """Mistral without windows is Llama, so the same model can be exported as both."""
    tiny_model("llama").export_hf(tmp_path / "llama", dtype="bfloat16")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pretraining_tp": 1, "dtype": "bfloat16"}))
    lm = xf.load(tmp_path / "llama")
    lm.export_hf(tmp_path / "mistral", family="mistral")
    lm.export_hf(tmp_path / "again", dtype="float32")
    mistral, again = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("mistral", "again"))
    assert mistral["model_type"] == "mistral" and mistral["torch_dtype"] == "bfloat16"
    assert "pretraining_tp" not in mistral and again["pretraining_tp"] == 1 and again["dtype"] == "float32"


def test_special_ids_are_those_of_the_exported_tokenizer(tmp_path):
    """Not the family's default ids: Llama's texts end at 2, which is an ordinary token here."""

    def special_ids(name: str) -> list:
        config = json.loads((tmp_path / name / "config.json").read_text())
        return [config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")]

    lm = tiny_model("llama")
    lm.export_hf(tmp_path / "bytes")
    lm.tokenizer = None
    lm.export_hf(tmp_path / "none")
    made.write(tmp_path / "made", {"tokenizer.json": made.byte_level()})
    lm = xf.load(tmp_path / "bytes")
    lm.tokenizer = load_tokenizer(tmp_path / "made")
    lm.export_hf(tmp_path / "other")
    assert special_ids("bytes") == [None, 256, None]
    assert special_ids("none") == [None] * 3
    assert special_ids("other") == [None, 0, None]
    config = json.loads((tmp_path / "other" / "tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}


def test_special_ids_of_an_imported_folder_are_kept(tmp_path):
    tiny_model("llama").export_hf(tmp_path / "a")
    edit_config(tmp_path / "a", eos_token_id=[7, 8])
    xf.load(tmp_path / "a").export_hf(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["eos_token_id"] == [7, 8]
