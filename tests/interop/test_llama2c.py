"""Models of llama2.c: a trained model's reference text, both file versions, and one-line errors for damaged files."""

import ast
import pickle
import struct

import jax
import numpy as np
import pytest

import xfresearch as xf
from tests.blocks import block
from tests.data.conftest import shared
from tests.parity.weights import paired
from xfresearch import convert, generate
from xfresearch.models import transformer
from xfresearch.models.model_config import ModelConfig, resolve_model


@pytest.fixture(scope="module")
def stories():
    return xf.load(shared("stories260K/stories260K.bin"))


def reference_text() -> bytes:
    """The output of run.c: `expected_stdout` in llama2.c's own test file, which is parsed but never run."""
    tree = ast.parse(shared("stories260K/test_all.py").read_text())
    values = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return next(value for value in map(ast.literal_eval, values) if isinstance(value, bytes))


def test_a_trained_model_writes_its_reference_text(stories, tmp_path, capsysbinary):
    # run.c with -n 200 reads <s> at step 0 and samples a token at each of steps 0 to 199, which makes 200 tokens; like
    # ours, it stops at <s>. The newline that it prints at the end is not part of the text; our command prints one too.
    text = stories.generate("", max_new_tokens=200, temperature=0.0)
    assert text.encode() == reference_text()
    stories.save(tmp_path / "saved")
    saved = xf.load(tmp_path / "saved")
    assert saved.generate("", max_new_tokens=200, temperature=0.0) == text
    assert (saved.tokenizer.digest, saved.run) == (stories.tokenizer.digest, stories.run)
    path = str(shared("stories260K/stories260K.bin"))
    generate.main(["--workdir", path, "--max-new-tokens", "200", "--temperature", "0"])
    assert capsysbinary.readouterr().out == text.encode() + b"\n"


def test_a_prompt_is_continued(stories):
    text = reference_text().decode()
    prompt = text[: text.index(" She")]
    more = stories.generate(prompt, max_new_tokens=40, temperature=0.0)
    assert more.startswith(" She loved") and text.startswith(prompt + more)


def random_model(tied: bool):
    """A model of odd sizes with random parameters, made without the importer."""
    main = block(
        norm="rms",
        norm_cast="before_gain",
        attention={"heads": 6, "kv_heads": 2, "position": "rope"},
        feed_forward={"kind": "swiglu", "hidden": 20},
    )
    model = ModelConfig(
        width=36, depth=3, vocab_size=300, max_length=24, blocks={"main": main}, final_norm="rms", tie_embeddings=tied
    )
    model = resolve_model(model)
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda p: rng.standard_normal(p.shape, np.float32), transformer.abstract(model))


def write(path, model, params: dict, version: int) -> None:
    """Writes `params` as llama2.c's export.py does, and a tokenizer next to them."""
    block = params["blocks"]["main"]
    N = model.depth
    attention = block["attention"]
    feed_forward = block["feed_forward"]
    kernels = {name: part["kernel"] for name, part in (attention | feed_forward).items()}
    kernels |= {name: paired(kernels[name], 1.0) for name in ("query", "key")}
    inputs = {name: model.width for name in ("query", "key", "value", "gate", "up")} | {
        "output": model.width,
        "down": 20,
    }
    matrices = {name: kernel.reshape(N, inputs[name], -1).swapaxes(1, 2) for name, kernel in kernels.items()}
    qkvo = [matrices[name] for name in ("query", "key", "value", "output")]
    w123 = [matrices[name] for name in ("gate", "down", "up")]
    norms = [block["attention_norm_in"]["gain"], block["feed_forward_norm_in"]["gain"], params["final_norm"]["gain"]]
    embed = params["embed"]["table"]
    tied = model.tie_embeddings
    head = [] if tied else [params["head"]["table"]]
    sizes = [36, 20, N, 6, 2, 300, 24]
    if version:
        start = struct.pack("<Ii7iB", 0x616B3432, 1, *sizes, tied).ljust(256, b"\0")
        tensors = [*norms, embed, *qkvo, *w123, *head]
    else:
        start = struct.pack("<7i", *sizes[:5], 300 if tied else -300, 24)
        rotations = np.full((2, 24, 3), np.nan, np.float32)  # not read
        tensors = [embed, norms[0], *qkvo, norms[1], *w123, norms[2], rotations, *head]
    path.write_bytes(start + b"".join(np.ascontiguousarray(tensor, "<f4").tobytes() for tensor in tensors))
    (path.parent / "tok300.bin").write_bytes(tokenizer(300))


def tokenizer(size: int) -> bytes:
    """A llama2.c tokenizer file of `size` tokens."""
    pieces = [b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(256))]
    pieces += [b"%03d" % i for i in range(size - 259)]
    return struct.pack("<i", 6) + b"".join(struct.pack("<fi", 0.0, len(piece)) + piece for piece in pieces)


@pytest.fixture
def written(tmp_path):
    write(tmp_path / "model.bin", *random_model(tied=True), version=0)
    return tmp_path / "model.bin"


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_read_in_our_order(tmp_path, version, tied):
    model, params = random_model(tied)
    write(tmp_path / "model.bin", model, params, version)
    lm = xf.load(tmp_path / "model.bin")
    jax.tree.map(np.testing.assert_array_equal, lm.params, params)
    assert (lm.config, lm.run.model, lm.run.sequence_length, lm.tokenizer.vocab_size) == (model, model, 24, 300)


def test_parameters_are_sharded_over_a_mesh(written):
    from xfresearch.options.run_options import MeshConfig
    from xfresearch.sharding.mesh import device_mesh, mesh_sizes

    mesh = device_mesh(mesh_sizes(MeshConfig(), 1), jax.devices()[:1], "auto")
    sharded = xf.load(written, mesh=mesh)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(sharded.params)} == {mesh}
    jax.tree.map(np.testing.assert_array_equal, sharded.params, xf.load(written).params)


def test_the_tokenizer_named_by_the_vocabulary_size_comes_before_the_common_one(written):
    (written.parent / "tok300.bin").rename(written.parent / "tokenizer.bin")
    assert xf.load(written).run.data.tokenizer == str(written.parent / "tokenizer.bin")
    (written.parent / "tok300.bin").write_bytes(tokenizer(301))
    with pytest.raises(xf.UserError, match=r"tok300.bin: has 301 tokens; the model .*model.bin has 300"):
        xf.load(written)


DAMAGE = {
    "empty": (lambda good: b"", "the file is empty"),
    "truncated header": (lambda good: good[:27], "not a llama2.c model: its header is truncated at 27 bytes"),
    "truncated": (lambda good: good[:-4], "bytes; a llama2.c model with dim=36, hidden_dim=20, n_layers=3, n_heads=6"),
    "too long": (lambda good: good + b"\0", "bytes; a llama2.c model with dim=36"),
    "no layers": (lambda good: good[:8] + bytes(4) + good[12:], "n_layers=0 must be at least 1"),
    "no tokens": (lambda good: good[:20] + bytes(4) + good[24:], "vocab_size=0 must be at least 1"),
    "negative": (lambda good: struct.pack("<i", -36) + good[4:], "dim=-36 must be at least 1"),
    "heads": (lambda good: good[:12] + struct.pack("<i", 4) + good[16:], "must be an even multiple of n_heads=4"),
    "kv heads": (lambda good: good[:16] + struct.pack("<i", 4) + good[20:], "must be a multiple of n_kv_heads=4"),
    "length": (lambda good: good[:24] + struct.pack("<i", 1) + good[28:], "seq_len=1 must be at least 2"),
    "huge": (lambda good: struct.pack("<7i", *[2**30] * 3, 2, 2, *[2**30] * 2), "bytes; a llama2.c model with"),
    "version 2": (lambda good: struct.pack("<Ii", 0x616B3432, 2).ljust(256, b"\0"), "version 2 of llama2.c's files is not"),
    "truncated version 1": (lambda good: struct.pack("<Ii", 0x616B3432, 1), "its header is truncated at 8 bytes"),
    "zip": (lambda good: b"PK\3\4" + good, "a zip file: it must be a model of llama2.c"),
    "pickle": (lambda good: pickle.dumps({"a": 1}, 2), "which can run arbitrary code: convert it to safetensors"),
    "tokenizer": (lambda good: tokenizer(300), "a llama2.c tokenizer: it must be a model"),
    "text": (lambda good: b"once upon a time there was a text", "not a llama2.c model: dim=1701015151 must be"),
    "new pickle": (lambda good: pickle.dumps({"a": 1}), "which can run arbitrary code: convert it to safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_a_one_line_error(written, name):
    damage, message = DAMAGE[name]
    written.write_bytes(damage(written.read_bytes()))
    with pytest.raises(xf.UserError) as raised:
        xf.load(written)
    text = str(raised.value)
    assert text.startswith(f"{written}: ") and message in text and "\n" not in text


@pytest.mark.parametrize("name", [*DAMAGE, ""])
def test_an_import_of_a_file_says_what_it_is(written, tmp_path, name):
    damage, message = DAMAGE.get(name, (lambda good: good, "is a llama2.c model, which evaluate, generate and xf.load read"))
    written.write_bytes(damage(written.read_bytes()))
    with pytest.raises(xf.UserError) as raised:
        convert.main(["import", str(written), str(tmp_path / "run")])
    text = str(raised.value)
    assert text.startswith(str(written)) and message in text and "\n" not in text and "run's directory" not in text
    assert not (tmp_path / "run").exists()


def test_missing_files_and_steps_are_one_line_errors(written):
    cases = [
        ({"path": written.with_name("none.bin")}, "none.bin does not exist"),
        ({"path": written, "step": 3}, "step=3 is not allowed with .*model.bin"),
    ]
    for arguments, message in cases:
        with pytest.raises(xf.UserError, match=message):
            xf.load(**arguments)
    (written.parent / "tok300.bin").unlink()
    with pytest.raises(xf.UserError, match="tokenizer not found: neither tok300.bin nor tokenizer.bin is in its dir"):
        xf.load(written)


def test_a_file_is_loaded_in_float64_with_parameters_in_float64(written):
    lm = xf.load(written, dtype="float64")
    assert lm.config.param_dtype == "float64" and lm([[1, 2]]).dtype == np.float64
    jax.tree.map(np.testing.assert_array_equal, lm.params, random_model(tied=True)[1])
