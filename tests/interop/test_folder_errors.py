"""Every defect of a Hugging Face folder is a one-line error that names the file, tensor or key."""

import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import xfresearch as xf
from tests.interop.edits import UP, WEIGHTS, edit_config, edit_tensors
from tests.interop.record import RECORDED
from xfresearch.interop.folder import INDEX, stored_tensors


def error_of(folder: Path) -> str:
    with pytest.raises(xf.UserError) as caught:
        xf.load(folder)
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    return text


def test_a_missing_tensor_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.pop(UP))
    assert f"tensor {UP} is missing" in error_of(folder)


def test_a_misnamed_tensor_is_named_with_the_nearest_name(folder):
    edit_tensors(folder, lambda tensors: tensors.update({UP.replace("up_", "upp_"): tensors.pop(UP)}))
    assert error_of(folder).endswith(f"tensor {UP} is missing; did you mean '{UP.replace('up_', 'upp_')}'?")


def test_an_unexpected_tensor_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.update(extra=np.zeros(3, np.float32), more=np.zeros(3, np.float32)))
    message = error_of(folder)
    assert "tensor extra is unexpected (and 1 more): the llama model of config.json does not have it" in message


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder):
    edit_tensors(folder, lambda tensors: tensors.update({UP: tensors[UP].T.copy()}))
    width, hidden = load_file(folder / WEIGHTS)[UP].shape
    shapes = f"has shape [{width}, {hidden}]: config.json requires [{hidden}, {width}]"
    assert f"tensor {UP} {shapes}" in error_of(folder)


def test_a_tied_head_that_differs_from_the_embedding_is_named(folder):
    """A copy of the embedding is accepted."""
    edit_config(folder, tie_word_embeddings=True)
    message = error_of(folder)
    assert "tensors lm_head.weight and model.embed_tokens.weight differ: tie_word_embeddings in config.json" in message
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert xf.load(folder).config.tie_embeddings
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((-1, -1), 7.0))
    assert "model.embed_tokens.weight differ" in error_of(folder)


def test_experts_in_mxfp4_are_named(tmp_path):
    """As OpenAI published them: with a key of config.json, and, if it is lost, by the names of the tensors."""
    folder = tmp_path / "gpt_oss"
    shutil.copytree(RECORDED / "gpt_oss", folder)
    packed = "model.layers.0.mlp.experts.down_proj"

    def pack(tensors):
        del tensors[packed]
        tensors |= {f"{packed}_{part}": np.zeros((5, 16, 1), np.uint8) for part in ("blocks", "scales")}

    edit_tensors(folder, pack)
    assert f"tensor {packed}_blocks, with its scales, is packed: MXFP4 is not read; save it in bfloat16" in error_of(folder)
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    assert "quantization_config.quant_method='mxfp4' is not allowed: MXFP4 is not read; save it" in error_of(folder)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("kind, dtype", [("I8", "int8"), ("F8_E4M3", "float8_e4m3fn")])
def test_a_tensor_of_a_quantized_dtype_is_named(folder, kind, dtype, everywhere):
    """The header is edited, because the NumPy interface of safetensors does not write 8-bit floats."""
    header, data = parts(folder / WEIGHTS)
    for name in header if everywhere else [UP]:
        if name != "__metadata__":
            header[name]["dtype"] = kind
            rows, *others = header[name]["shape"]
            header[name]["shape"] = [4 * rows, *others]  # the same number of bytes
    join(folder / WEIGHTS, header, data)
    text = error_of(folder)
    assert f"has dtype {kind}: it must be one of F16, BF16, F32, F64" in text
    assert everywhere or UP in text


def parts(file: Path) -> tuple[dict, bytes]:
    """The header and the data of a safetensors file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(file: Path, header, data: bytes) -> None:
    """Writes a safetensors file with this header and data."""
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "keep, text", [(-1, "truncated: tensor"), (100, "its header is truncated"), (3, "header is truncated")]
)
def test_a_truncated_file_is_named(folder, keep, text):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    message = error_of(folder)
    assert text in message and str(file) in message


def test_a_wrong_header_is_an_error(folder):
    header, data = parts(folder / WEIGHTS)
    entries = [
        [],
        {"dtype": "F32", "shape": [2, 2]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 15]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": ["2", 2], "data_offsets": [0, 16]},
        {"dtype": 5, "shape": [2, 2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**82]},
        {"dtype": "F32", "shape": [2**200], "data_offsets": [0, 2**202]},
    ]
    for entry in entries:
        join(folder / WEIGHTS, header | {UP: entry}, data)
        assert UP in error_of(folder)
    for wrong in ([], "text", 5):
        join(folder / WEIGHTS, wrong, data)
        assert "safetensors file" in error_of(folder)
    (folder / WEIGHTS).write_bytes((4).to_bytes(8, "little") + b"\xff{}\x00")
    assert "its header is not JSON" in error_of(folder)


def test_a_missing_file_of_an_index_is_named(sharded, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "m")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert error_of(folder).endswith(f"{INDEX}: it lists {gone.name}, which is not in the folder")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}']
)
def test_a_broken_index_is_named(sharded, tmp_path, content):
    folder = shutil.copytree(sharded, tmp_path / "m")
    (folder / INDEX).write_text(content)
    assert f"{folder / INDEX}: {'not an index of safetensors files' if content else 'the file is empty'}" in error_of(folder)


def test_a_tensor_in_two_files_is_named(sharded, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    shutil.copy(folder / index["weight_map"][UP], folder / "again.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"again": "again.safetensors"}}))
    assert re.search(r"tensor model\.layers\.\S+ is also in again.safetensors", error_of(folder))


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/hostname", "a\0.safetensors", "a" * 100_000, "", "."])
def test_an_index_cannot_list_files_outside_its_folder(folder, name):
    (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {UP: name}}))
    assert len(message := error_of(folder)) < 1000 and "which is not in the folder" in message


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"model_type": "lama"}, "config.json: model_type='lama' is not supported: the families are gpt2, .*, roberta$"),
        ({"model_type": "electra"}, "config.json: model_type='electra'"),
        ({"model_type": None}, "config.json: model_type is missing, .*: its tensors have the names of llama: "),
        ({"model_type": ["llama"]}, r"config.json: model_type=\['llama'\]"),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"hidden_size": "12"}, "config.json: hidden_size='12' has the wrong type str: it must be an integer"),
        ({"hidden_size": -4}, "config.json: hidden_size=-4.* at least 1"),
        ({"hidden_size": 12.5}, "config.json: hidden_size=12.5 has the wrong type float"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads=0"),
        ({"hidden_size": 2**63}, "config.json: hidden_size=9223372036854775808 .* below 2.31"),
        ({"num_hidden_layers": 10**6}, "config.json: num_hidden_layers=1000000 is more than the files have tensors, "),
        ({"num_attention_heads": [4]}, r"config.json: num_attention_heads=\[4\] has the wrong type list"),
        ({"rms_norm_eps": "tiny"}, "config.json: rms_norm_eps='tiny' has the wrong type str: it must be a number"),
        ({"rope_theta": "a"}, "config.json: rope_theta='a' has the wrong type: it must be a number"),
        ({"rope_theta": -1}, "config.json: rope_theta=-1.0"),
        ({"rope_theta": 10**400}, r"config.json: rope_theta=10+ has the wrong type: it must be a number"),
        (
            {"model_type": "gemma2", "query_pre_attn_scalar": 10**400},
            "config.json: query_pre_attn_scalar=10+ has the wrong type: it must be a number",
        ),
        ({"rope_scaling": "linear"}, "config.json: rope_scaling='linear' has the wrong type: it must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "config.json: rope_scaling has no factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            "config.json: factor=0.5.* at l",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "config.json: rope_type='longrope'"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"config.json: rope_type=\['yarn'\]"),
        ({"hidden_act": "sillu"}, "config.json: hidden_act='sillu'"),
        ({"hidden_act": ["silu"]}, r"config.json: hidden_act=\['silu'\]"),
        ({"tie_word_embeddings": "yes"}, "config.json: tie_word_embeddings='yes' has the wrong type str"),
        ({"quantization_config": {"bits": 4}}, "config.json: quantization_config"),
        ({"num_hidden_layers": 3}, r"tensor model.layers.2.* is missing \(and \d more\)"),
        ({"num_hidden_layers": 1}, r"tensor model.layers.1.* is unexpected \(and \d more\): the llama model of config"),
        (
            {"vocab_size": 256},
            r"tensor model.embed_tokens.weight has shape \[257, 32\]: config.json requires \[256, 32\]",
        ),
    ],
)
def test_a_wrong_value_in_config_json_is_an_error_that_names_the_key(folder, changes, text):
    edit_config(folder, **changes)
    with pytest.raises(xf.UserError, match=f"^{folder}: {text}"):
        xf.load(folder)


@pytest.mark.parametrize(
    "content, text",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "holds a JSON list: it must be an object"),
        (None, "file not found: a Hugging Face folder must have one"),
    ],
)
def test_a_missing_or_invalid_config_json_is_named(folder, content, text):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    message = error_of(folder)
    assert message.startswith(f"{folder / 'config.json'}: ") and text in message


class Bomb:
    """Its pickle creates a file when it is opened."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_never_opened(folder, tmp_path, name):
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "opened")))
    assert f"{folder / name}: pickle files can run arbitrary code and are not supported" in error_of(folder)
    assert not (tmp_path / "opened").exists()
    pickle.loads((folder / name).read_bytes())  # shows that opening it would have created the file
    assert (tmp_path / "opened").exists()


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer_config.json", WEIGHTS])
def test_a_link_that_leaves_the_folder_is_refused(folder, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text("a key")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    assert f"{folder / name}: a link that leaves the folder is not followed" in error_of(folder)


def test_the_links_of_the_hubs_cache_are_followed_and_only_named_files_are_copied(folder, tmp_path):
    model = tmp_path / "models--a--b"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "c0ffee").mkdir(parents=True)
    (folder / "notes.txt").write_text("private")
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, model / "blobs" / str(number))
        (model / "snapshots" / "c0ffee" / file.name).symlink_to(f"../../blobs/{number}")
    lm = xf.load(model / "snapshots" / "c0ffee")
    lm.save(tmp_path / "run")
    xf.load(tmp_path / "run").export_hf(tmp_path / "exported")
    assert not list(tmp_path.glob("run/**/notes.txt")) and not (tmp_path / "exported" / "notes.txt").exists()
    assert {"config.json", WEIGHTS} <= {file.name for file in (tmp_path / "exported").iterdir()}


def test_an_index_next_to_a_whole_file_is_ignored(folder):
    """As in `transformers`."""
    shutil.copy(folder / WEIGHTS, folder / "other.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {UP: "other.safetensors"}}))
    assert {tensor.file.name for tensor in stored_tensors(folder).values()} == {WEIGHTS}


def test_a_pickle_next_to_safetensors_is_ignored(folder, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "opened")))
    assert xf.load(folder).config.vocab_size == 257 and not (tmp_path / "opened").exists()


def test_folders_without_weights_or_without_any_file_are_errors(folder, tmp_path):
    (folder / WEIGHTS).unlink()
    assert error_of(folder).endswith(f"{folder}: it has neither {WEIGHTS} nor {INDEX}")
    (tmp_path / "empty").mkdir()
    assert "a Hugging Face folder (config.json and safetensors)" in error_of(tmp_path / "empty")


def test_a_checkpoint_of_a_trainer_is_read_and_its_output_names_it(folder, tmp_path):
    """Pickles of the optimizer are no weights, with a model beside them and without one."""
    output = tmp_path / "output"
    shutil.copytree(folder, output / "checkpoint-20")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (output / "checkpoint-20" / name).write_bytes(pickle.dumps(1))
    (output / "training_args.bin").write_bytes(pickle.dumps(1))
    assert xf.load(output / "checkpoint-20").config.vocab_size == 257
    says = f"{output} is the output of a Trainer: give the model in it, {output / 'checkpoint-20'}"
    assert error_of(output) == says
    shutil.copy(folder / "config.json", output)
    assert error_of(output) == says
    (output / "checkpoint-20" / WEIGHTS).unlink()
    assert error_of(output / "checkpoint-20").endswith("are not those of a model's weights")


@pytest.mark.parametrize("name", ["score.weight", "classifier.bias", "classification_head.dense.weight", "qa_outputs.bias"])
def test_the_head_of_a_classifier_is_named(folder, name):
    """Also where the head of a language model is missing."""
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors.pop("lm_head.weight")[0]}))
    assert f"tensor {name} is the head of a classifier, whose outputs are no tokens: give the lang" in error_of(folder)


@pytest.mark.parametrize(
    "name, what",
    [
        ("model.Q4_K_M.gguf", "GGUF, the weights of llama.cpp, cannot be read: .* transformers 5 .*gguf_file=name"),
        ("flax_model.msgpack", "the weights of Flax cannot be read: .* transformers 4 .*from_flax=True"),
        ("tf_model.h5", "the weights of TensorFlow cannot be read: .* transformers 4 .*from_tf=True"),
        ("bert_model.ckpt.index", "the weights of TensorFlow cannot be read"),
        ("model.ckpt-1000.index", "the weights of TensorFlow cannot be read"),
        ("onnx/model.onnx", "ONNX cannot be read: take safetensors of the same model$"),
        ("model.onnx", "ONNX cannot be read: take safetensors of the same model$"),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_weights_of_other_libraries_are_named(folder, name, what, config):
    """With safetensors beside them they are passed over."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"weights")
    assert xf.load(folder).config.vocab_size == 257
    (folder / WEIGHTS).unlink()
    if config:
        assert re.search(f"^{folder / name}: {what}", error_of(folder))
    elif "/" not in name:
        (folder / "config.json").unlink()
        assert re.search(f"^{folder / name}: {what}", error_of(folder))


def test_a_step_of_a_folder_is_an_error(folder):
    with pytest.raises(xf.UserError, match="step=3 is not allowed with .*, which holds one model"):
        xf.load(folder, step=3)
