"""Import of Hugging Face folders: export reproduces the folder exactly, on one device and on several."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import xfresearch as xf
from tests.data import made_tokenizers
from tests.interop.edits import UP, WEIGHTS, edit_config, edit_tensors
from tests.interop.folders import assert_same_tensors
from tests.simulated import results_on_devices
from tests.tiny_runs import rough_params, tiny_model
from xfresearch.evaluation import losses

TOKENS_BL = np.random.default_rng(0).integers(0, 257, (2, 8))


def test_import_of_an_exported_model_gives_the_same_model(whole, sharded):
    lm = tiny_model("llama")
    for path in (whole, sharded):
        loaded = xf.load(path)
        jax.tree.map(np.testing.assert_array_equal, loaded.params, lm.params)
        np.testing.assert_array_equal(loaded(TOKENS_BL), lm(TOKENS_BL))
        assert loaded.tokenizer.digest == lm.tokenizer.digest


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bare", [False, True])
def test_a_saved_model_is_exported_as_it_was_imported(tmp_path, dtype, bare):
    """Names with and without the family's prefix, one tensor in another dtype, and files that we do not read."""
    before = tmp_path / "before"
    tiny_model("gpt2").export_hf(before, dtype=dtype)

    def change(tensors):
        name = "transformer.h.0.ln_1.weight"
        tensors[name] = tensors[name].astype(np.float32)
        if bare:
            for name in list(tensors):
                tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    edit_tensors(before, change)
    for name, content in {
        "tokenizer_config.json": b'{"model_max_length": 1e30,  "chat_template": "x"}\r\n',
        "generation_config.json": b'{"temperature":0.6}',
        "chat_template.jinja": "{{ é }}".encode(),
    }.items():
        (before / name).write_bytes(content)
    (before / "notes.txt").mkdir()  # a directory, which is not copied
    edit_config(before, task_specific_params={"a": 1})
    xf.load(before).save(tmp_path / "run")
    xf.load(tmp_path / "run").export_hf(tmp_path / "after")
    names = {file.name for file in before.iterdir() if file.is_file()}
    assert names == {file.name for file in (tmp_path / "after").iterdir()}
    for name in names - {WEIGHTS, "config.json"}:
        assert (before / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    first, second = (load_file(path / WEIGHTS) for path in (before, tmp_path / "after"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.dtype, tensor.tobytes()) == (second[name].dtype, second[name].tobytes()), name
    first, second = (json.loads((path / "config.json").read_text()) for path in (before, tmp_path / "after"))
    assert first == second


def test_a_single_float64_tensor_keeps_its_precision(folder, tmp_path):
    wide = np.full(32, 1 + 2.0**-40)
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": wide}))
    lm = xf.load(folder)
    assert (lm.config.dtype, lm.config.param_dtype) == ("float32", "float64")
    lm.save(tmp_path / "run")
    xf.load(tmp_path / "run").export_hf(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", folder)
    assert lm(TOKENS_BL).dtype == np.float32


def write_tokenizer(kind: str, directory: Path) -> None:
    """Writes the files of a tokenizer of this kind, with tokenizer_config.json and generation_config.json."""
    if kind == "tokenizer.model":
        (directory / kind).write_bytes(made_tokenizers.sentence_piece())
    elif kind == "tokenizer.json":
        (directory / kind).write_text(made_tokenizers.byte_level())
    else:
        model = json.loads(made_tokenizers.byte_level())["model"]
        (directory / "vocab.json").write_text(json.dumps(model["vocab"], indent=1))
        merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
        (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (directory / "tokenizer_config.json").write_text('{"eos_token": {"content": "a"}, "other": 1}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6], "temperature": 0.6}')


@pytest.mark.parametrize("kind", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_tokenizer_files_are_kept_byte_for_byte(folder, tmp_path, kind):
    """Also through a saved model, which keeps the same stop tokens."""
    (folder / "bytes.json").unlink()
    write_tokenizer(kind, folder)
    lm = xf.load(folder)
    lm.save(tmp_path / "run")
    kept = xf.load(tmp_path / "run")
    assert kept.tokenizer.stops == lm.tokenizer.stops and set(lm.tokenizer.stops) >= {5, 6}
    kept.export_hf(tmp_path / "out")
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "config.json"}
    assert files == {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir() if f.name != "config.json"}


def test_another_tokenizer_replaces_that_of_the_folder(folder, tmp_path):
    (folder / "tokenizer_config.json").write_text("{}")
    lm = xf.load(folder)
    lm.tokenizer.digest = "another"
    lm.export_hf(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"bytes.json", "config.json", WEIGHTS}


def test_a_model_without_a_tokenizer_has_logits_but_no_text(folder, tmp_path):
    (folder / "bytes.json").unlink()
    xf.load(folder).save(tmp_path / "run")
    lm = xf.load(tmp_path / "run")
    assert lm.tokenizer is None and lm(TOKENS_BL).shape == (2, 8, 257)
    with pytest.raises(xf.UserError, match="this model has no tokenizer"):
        lm.generate("a")
    with pytest.raises(xf.UserError, match="run has no tokenizer, so it cannot be evaluated on text"):
        losses.read_text(lm, tmp_path / "run")
    lm.export_hf(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", WEIGHTS}


def test_the_dtype_of_computation_can_be_chosen(folder, tmp_path):
    xf.load(folder).save(tmp_path / "run")
    for path in (folder, tmp_path / "run"):
        lm = xf.load(path, dtype="bfloat16")
        assert (lm.config.dtype, lm.config.param_dtype, xf.load(path).config.dtype) == (
            "bfloat16",
            "float32",
            "float32",
        )
        assert not np.array_equal(lm(TOKENS_BL), xf.load(path)(TOKENS_BL))
        with pytest.raises(xf.UserError, match="model.dtype='int8'.* one of float32"):
            xf.load(path, dtype="int8")


def test_nan_values_are_read_unchanged_if_they_are_allowed(folder):
    edit_tensors(folder, lambda tensors: tensors[UP].__setitem__((0, 0), np.nan))
    up = xf.load(folder, allow_nonfinite=True).params["blocks"]["main"]["feed_forward"]["up"]["kernel"]
    assert np.isnan(up[1, 0, 0]) and np.isnan(up).sum() == 1


def test_parameters_sharded_over_devices_equal_those_on_one(tmp_path):
    """Each of eight simulated devices holds only its shard, and export writes the whole tensors."""
    lm = tiny_model("llama")
    whole = tmp_path / "whole"
    lm.config = replace(lm.config, vocab_size=264)  # divisible by the size of the mesh axis
    lm.params = rough_params(lm.config)
    lm.export_hf(whole)
    results = results_on_devices(8, "-m", "tests.interop.mesh_worker", str(whole), str(tmp_path))
    assert results["fsdp"]["held"] < 0.2 and results["mixed"]["held"] < 0.35
    for name, result in results.items():
        assert result["equal"]
        assert (tmp_path / name / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
