"""Every analysis runs from the command line on models of others: folders written by `transformers`, and a trained model of
llama2.c."""

import json
import shutil

import numpy as np
import pytest

import xfresearch
from tests.daily import daily
from tests.data import made_tokenizers as made
from tests.data.conftest import shared
from tests.interop.record import RECORDED
from xfresearch import analyze
from xfresearch.analysis.registry import ANALYSES

# A model with random parameters knows no fact to trace: tests/parity/test_editing.py traces one of its guesses.
NAMES = [name for name in ANALYSES if name not in ("routing", "trace")]
FOLDERS = ("gpt2", "llama", "mixtral", "gpt_oss")
CASES = [(model, name) for model in FOLDERS for name in NAMES] + [("mixtral", "routing")]
PIECES = ["<s>", "<pad>", "</s>", *"abcdehnort\u0120\u010a", "th", "\u0120r"]  # fewer than the ids of the models
TOKENIZER = {
    "vocab.json": {piece: number for number, piece in enumerate(PIECES)},
    "merges.txt": "#version: 0.2\nt h\n\u0120 r\n",
    "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "notes.txt"
    path.write_text("".join(f"the red rat ran and then the {word} hat had a rat\n" for word in ("bad", "red", "hot") * 300))
    return f"text_files:{path}"


@pytest.fixture
def facts(tmp_path):
    """facts(object) writes a relation, and returns it as a corpus."""

    def write(object_: str = "hat") -> str:
        path = tmp_path / "relation.json"
        samples = [{"subject": "rat", "object": object_}, {"subject": "cat", "object": "hat"}]
        relation = {"name": "thing", "prompt_templates": ["{} had a", "a {} ate"], "samples": samples}
        path.write_text(json.dumps(relation))
        return f"facts:{path}"

    return write


def ran(name: str, workdir, data: str, folder) -> dict:
    """Runs an analysis on the command line. Its data.json and arrays."""
    flags = ["--data", data, "--count", "2", "--sequence-length", "12"]
    if name == "patching":
        flags = ["--clean", "the red rat", "--corrupted", "the rat red"]
    if name in ("recall", "trace"):
        flags = flags[:2]
    analyze.main([name, "--workdir", str(workdir), "--to", str(folder), *flags])
    assert (folder / "report.html").stat().st_size > 5000 and list(folder.glob("picture_*.svg"))
    return json.loads((folder / "data.json").read_text()) | {"arrays": dict(np.load(folder / "arrays.npz"))}


def require_finite(result: dict) -> None:
    figures = {name: value for name, (value, _) in result["summary"].items() if "correlation" not in name}
    assert figures and all(np.isfinite(value) for value in figures.values()), figures
    assert all(np.isfinite(value).any() for value in result["arrays"].values() if value.dtype.kind == "f")


DAILY = [("mixtral", name) for name in ("memories", "norms", "routing")]  # the others compile many programs


@pytest.mark.parametrize("model, name", daily(DAILY, CASES))
def test_every_analysis_runs_on_folders_of_transformers(model, name, corpus, facts, tmp_path):
    shutil.copytree(RECORDED / model, tmp_path / "model")
    made.write(tmp_path / "model", TOKENIZER)
    result = ran(name, tmp_path / "model", facts() if name == "recall" else corpus, tmp_path / "found")
    assert result["analysis"] == name
    require_finite(result)


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, "trace"])
def test_every_analysis_runs_on_a_trained_model(name, corpus, facts, tmp_path):
    model = shared("stories260K/stories260K.bin")
    if name in ("recall", "trace"):  # of a fact that the model takes to be true
        corpus = facts(xfresearch.load(model).generate("a rat ate", max_new_tokens=6, temperature=0.0).split()[0])
    result = ran(name, model, corpus, tmp_path / "found")
    require_finite(result)
    if name == "lens":
        divergence = result["arrays"]["divergence"]
        assert (np.diff(divergence) < 0).all()  # each layer is nearer to the final prediction
