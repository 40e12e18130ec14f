"""Every flaw of a Hugging Face folder is one line that names it."""

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
from xfresearch.interop.folder import INDEX


def refusal(folder: Path) -> str:
    with pytest.raises(xf.UserError) as caught:
        xf.load(folder)
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    return text


def test_a_tensor_that_is_missing_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.pop(UP))
    assert f"tensor {UP} is missing" in refusal(folder)


def test_a_tensor_that_is_misnamed_is_named_with_what_is_there(folder):
    edit_tensors(folder, lambda tensors: tensors.update({UP.replace("up_", "upp_"): tensors.pop(UP)}))
    assert refusal(folder).endswith(f"tensor {UP} is missing; did you mean '{UP.replace('up_', 'upp_')}'?")


def test_a_tensor_in_excess_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.update(extra=np.zeros(3, np.float32), more=np.zeros(3, np.float32)))
    assert "tensor extra is not one that config.json's llama has (and 1 more)" in refusal(folder)


def test_a_tensor_of_another_shape_is_named_with_both(folder):
    edit_tensors(folder, lambda tensors: tensors.update({UP: tensors[UP].T.copy()}))
    width, hidden = load_file(folder / WEIGHTS)[UP].shape
    shapes = f"has the shape [{width}, {hidden}]: config.json makes it [{hidden}, {width}]"
    assert f"tensor {UP} {shapes}" in refusal(folder)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_named(folder):
    """A second copy is passed over, another matrix is not."""
    edit_config(folder, tie_word_embeddings=True)
    assert "tensors lm_head.weight and model.embed_tokens.weight are not the same: config.json" in refusal(folder)
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert xf.load(folder).config.tie_embeddings
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"].__setitem__((-1, -1), 7.0))
    assert "are not the same" in refusal(folder)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("kind, dtype", [("I8", "int8"), ("F8_E4M3", "float8_e4m3fn")])
def test_a_tensor_of_a_quantised_dtype_is_named(folder, kind, dtype, everywhere):
    """The library's NumPy face does not write eight-bit floats: the header is."""
    header, data = parts(folder / WEIGHTS)
    for name in header if everywhere else [UP]:
        if name != "__metadata__":
            header[name]["dtype"] = kind
            header[name]["shape"] = [4 * header[name]["shape"][0], *header[name]["shape"][1:]]  # as many bytes
    join(folder / WEIGHTS, header, data)
    text = refusal(folder)
    assert f"has dtype {kind}: it must be one of F16, BF16, F32, F64" in text
    assert everywhere or UP in text


def parts(file: Path) -> tuple[dict, bytes]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(file: Path, header, data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "keep, text", [(-1, "cut off: tensor"), (100, "it ends within its header"), (3, "ends within")]
)
def test_a_file_that_was_cut_off_is_named(folder, keep, text):
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    said = refusal(folder)
    assert text in said and str(file) in said


def test_a_header_that_lies_is_refused(folder):
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
        assert UP in refusal(folder)
    for wrong in ([], "text", 5):
        join(folder / WEIGHTS, wrong, data)
        assert "safetensors file" in refusal(folder)
    (folder / WEIGHTS).write_bytes((4).to_bytes(8, "little") + b"\xff{}\x00")
    assert "its header is not JSON" in refusal(folder)


def test_a_shard_that_is_missing_is_named(sharded, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "m")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert refusal(folder).endswith(f"{INDEX}: it names {gone.name}, a file that is not there")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}']
)
def test_a_broken_index_is_named(sharded, tmp_path, content):
    folder = shutil.copytree(sharded, tmp_path / "m")
    (folder / INDEX).write_text(content)
    assert f"{folder / INDEX}: not an index of safetensors files" in refusal(folder)


def test_a_tensor_in_two_files_is_named(sharded, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    shutil.copy(folder / index["weight_map"][UP], folder / "again.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | {"again": "again.safetensors"}}))
    assert re.search(r"tensor model\.layers\.\S+ is in again.safetensors too", refusal(folder))


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/hostname"])
def test_an_index_stays_in_its_folder(folder, name):
    shutil.copy(folder / WEIGHTS, folder.parent / "elsewhere.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {UP: name}}))
    assert "a file that is not there" in refusal(folder)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"model_type": "lama"}, "model_type='lama' is not allowed: it must be one of gpt2,.* did you mean 'llama'"),
        ({"model_type": "bert"}, "model_type='bert' is not allowed: it must be one of"),
        ({"model_type": None}, "model_type=None is not allowed: it must be one of"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] is not allowed"),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"hidden_size": "12"}, "config.json: hidden_size='12' has the wrong type str: it must be an integer"),
        ({"hidden_size": -4}, "config.json: hidden_size=-4 is not allowed: it must be at least 1"),
        ({"hidden_size": 12.5}, "config.json: hidden_size=12.5 has the wrong type float"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads=0 is not allowed"),
        ({"num_attention_heads": [4]}, r"config.json: num_attention_heads=\[4\] has the wrong type list"),
        ({"rms_norm_eps": "tiny"}, "config.json: rms_norm_eps='tiny' has the wrong type str: it must be a number"),
        ({"rope_theta": "a"}, "config.json: rope_theta='a' has the wrong type: it must be a number"),
        ({"rope_theta": -1}, "config.json: rope_theta=-1.0 is not allowed"),
        ({"rope_scaling": "linear"}, "config.json: rope_scaling='linear' has the wrong type: it must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "config.json: rope_scaling has no factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            "config.json: factor=0.5 is not allowed: it must be at l",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "config.json: rope_type='longrope' is not allowed: it must be one of"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"config.json: rope_type=\['yarn'\] is not allowed: it must be one of"),
        ({"hidden_act": "sillu"}, "config.json: hidden_act='sillu' is not allowed: it must be one of"),
        ({"hidden_act": ["silu"]}, r"config.json: hidden_act=\['silu'\] is not allowed"),
        ({"tie_word_embeddings": "yes"}, "config.json: tie_word_embeddings='yes' has the wrong type str"),
        ({"quantization_config": {"bits": 4}}, "config.json: quantization_config is not allowed"),
        ({"num_hidden_layers": 3}, r"tensor model.layers.2.* is missing \(and \d more\)"),
        ({"num_hidden_layers": 1}, r"tensor model.layers.1.* is not one that config.json's llama has \(and \d more\)"),
        (
            {"vocab_size": 256},
            r"tensor model.embed_tokens.weight has the shape \[257, 32\]: config.json makes it \[256, 32\]",
        ),
    ],
)
def test_a_config_that_is_wrong_is_said_of_its_key(folder, changes, text):
    edit_config(folder, **changes)
    with pytest.raises(xf.UserError, match=f"^{folder}: {text}"):
        xf.load(folder)


@pytest.mark.parametrize(
    "content, text",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "holds a JSON list: it must be an object"),
        (None, "there is no such file, which says what the model is"),
    ],
)
def test_a_config_that_is_none_is_named(folder, content, text):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    said = refusal(folder)
    assert said.startswith(f"{folder / 'config.json'}: ") and text in said


class Bomb:
    """Whoever opens a pickle of it makes a file."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_never_opened(folder, tmp_path, name):
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "opened")))
    assert f"{folder / name}: a pickle, which can run any code and is never opened" in refusal(folder)
    assert not (tmp_path / "opened").exists()
    pickle.loads((folder / name).read_bytes())  # it would have
    assert (tmp_path / "opened").exists()


def test_a_pickle_beside_safetensors_does_no_harm(folder, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "opened")))
    assert xf.load(folder).config.vocab_size == 257 and not (tmp_path / "opened").exists()


def test_folders_without_weights_or_anything(folder, tmp_path):
    (folder / WEIGHTS).unlink()
    assert refusal(folder).endswith(f"{folder}: it holds no {WEIGHTS} and no {INDEX}")
    (tmp_path / "empty").mkdir()
    assert "or a Hugging Face folder (config.json and safetensors)" in refusal(tmp_path / "empty")


def test_a_folder_has_no_steps(folder):
    with pytest.raises(xf.UserError, match="step=3 is not allowed with .*, which holds one model"):
        xf.load(folder, step=3)
