"""What the fuzzers read. A target has a valid input, and a function that reads a damaged one.

The function returns if the input can be read, and raises UserError, Corrupt or Stopped if it cannot. Anything else is a
failure: another exception, a message of several lines, a result that the reference library does not give, a hang, memory.
"""

import json
import re
import shutil
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import numpy as np

import xfresearch as xf
from tests.data import made_tokenizers as made
from tests.field import make
from tests.fuzz import hostile
from tests.fuzz.tokenizers import llama2c_tokenizer, sentence_piece, steps, tokenizer_json, write_sentence_pieces
from tests.interop.edits import WEIGHTS
from tests.tiny_runs import ROOT, make_run, tiny_model
from xfresearch.checkpoints import store
from xfresearch.data.chat import templates
from xfresearch.data.corpus_files import read_documents
from xfresearch.data.records import read_record, read_records
from xfresearch.interop import llama2c
from xfresearch.interop.tensor_files import tensors_in
from xfresearch.loading.loading import read_params, stored
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError
from xfresearch.study import write_report

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def safetensors(file: Path) -> None:
    """Tensors equal those of the reference library, which refuses what we refuse (but reads names twice)."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        expected = load_file(file)
    except (SafetensorError, KeyError, AttributeError, TypeError, ValueError):  # also for dtypes that NumPy lacks
        expected = None
    by_name = {tensor.name: tensor.read() for tensor in tensors_in(file) if tensor.require_dtype() is None}
    assert expected is not None, "the reference library refuses this file"
    assert by_name.keys() == expected.keys()
    for name, value in expected.items():
        assert by_name[name].tobytes() == value.tobytes()


def header(file: Path) -> None:
    """`file` is the header of a safetensors file with 48 bytes of data."""
    text = file.read_bytes()
    whole = file.with_suffix(".safetensors")
    whole.write_bytes(len(text).to_bytes(8, "little") + text + bytes(48))
    safetensors(whole)


def folder(file: Path) -> None:
    """`file` is the config.json of a folder with intact weights."""
    assert xf.load(file.parent)([[1, 2, 3]]).shape[:2] == (1, 3)


def config_of_run(file: Path) -> None:
    """`file` is the config.json of a run with an intact checkpoint."""
    stored(file.parent)


def results_of_study(file: Path) -> None:
    """`file` is the results.json of a study: its pages are whole, and have no control character."""
    write_report(str(file.parent))
    for name in ("report.html", "report.md"):
        assert not CONTROL.search((file.parent / name).read_text()), name


def documents(file: Path) -> None:
    for text in read_documents(file, "text"):
        text.decode("utf8")


def rendered(file: Path) -> None:
    """`file` is a chat template."""
    assert isinstance(templates.render({file.name: file.read_bytes()}, [{"role": "user", "content": "a"}]), str)


def requests(file: Path) -> None:
    for record in read_records(file):
        assert record == read_record("record", record)


def llama2c_file(file: Path) -> None:
    llama2c.read_layout(file)


def overrides(file: Path) -> None:
    parse([f"--config={ROOT}/configs/moe.py:tiny", *file.read_bytes().decode("utf8", "replace").split("\n")])


@cache
def _model() -> xf.LanguageModel:
    return tiny_model("gpt2")


def prompt(file: Path) -> None:
    text = file.read_bytes().decode("utf8", "surrogateescape")[:12]
    assert isinstance(_model().generate(text, max_new_tokens=1, temperature=0.0), str)


def checkpoint(file: Path) -> None:
    """`file` is one of a run's checkpoint. What is read equals what was written."""
    lm = _model()
    workdir = next(parent.parent for parent in file.parents if parent.name == "checkpoints")
    jax.tree.map(np.testing.assert_array_equal, read_params(workdir, lm.config, 1), lm.params)


def _folder(name: str) -> Callable[[Path], list[Path]]:
    def make(directory: Path) -> list[Path]:
        tiny_model(name).export_hf(directory / "model")
        return [directory / "model" / "config.json"]

    return make


def _file(name: str, content: Callable[[], bytes]) -> Callable[[Path], list[Path]]:
    def make(directory: Path) -> list[Path]:
        (directory / name).write_bytes(content())
        return [directory / name]

    return make


def _requests(directory: Path) -> list[Path]:
    names = ("counterfact.json", "zsre_mend.json", "knowedit_counterfact.json", "mquake.json", "ours.json")
    return [Path(shutil.copy(make.FILES / "requests" / name, directory)) for name in names]


def _safetensors(directory: Path) -> list[Path]:
    (config,) = _folder("llama")(directory)
    whole = directory / "small.safetensors"
    shutil.copy(config.with_name(WEIGHTS), whole)
    return [whole]


def _config_of_run(directory: Path) -> list[Path]:
    return [make_run(directory / "run", "gpt2", steps=(1,)) / "config.json"]


def _checkpoint(directory: Path) -> list[Path]:
    lm = _model()
    store.save_params(directory / "run", 1, lm.params)
    return sorted(path for path in (directory / "run" / "checkpoints").rglob("*") if path.is_file())


def _llama2c() -> bytes:
    sizes = dict(dim=8, hidden=8, layers=1, heads=2, kv_heads=2, vocab=16, length=8)
    matrices = [16 * 8, 8, *[64] * 4, 8, *[64] * 3, 8, 8 * 2, 8 * 2]
    return struct.pack("<7i", *sizes.values()) + bytes(4 * sum(matrices))


LINES = "\n".join(json.dumps({"text": f"line {number} \u00e9", "id": number}) for number in range(20)) + "\n"
FLAGS = "--config.model.width=64\n--config.model.blocks.main.feed_forward.moe.experts=4\n--config.data.corpus=('a:b',)"
FLAGS += "\n--config.optimizer.learning_rate=1e-3\n--config.model.pattern=('main',)\n--config.steps=7"

STUDY = ROOT / "docs" / "data" / "studies" / "experts" / "results.json"
HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "BF16", "shape": [2, 2, 2], "data_offsets": [32, 48]},
}

# {name: (writes the valid files into a directory, reads one of them, makes a hostile one where damage finds none)}
TARGETS = {
    "safetensors": (_safetensors, safetensors),
    "header of safetensors": (_file("header.json", lambda: json.dumps(HEADER).encode()), header),
    "config.json of llama": (_folder("llama"), folder),
    "config.json of gpt2": (_folder("gpt2"), folder),
    "config.json of a run": (_config_of_run, config_of_run),
    "results.json of a study": (_file("results.json", STUDY.read_bytes), results_of_study),
    "tokenizer.json, byte level": (_file("tokenizer.json", lambda: made.byte_level().encode()), tokenizer_json),
    "tokenizer.json, byte fallback": (_file("tokenizer.json", lambda: made.byte_fallback().encode()), tokenizer_json),
    "tokenizer.model": (write_sentence_pieces, sentence_piece),
    "tokenizer.bin": (_file("t.bin", lambda: made.llama2c(made.sentence_piece())), llama2c_tokenizer),
    "jsonl": (_file("a.jsonl", LINES.encode), documents),
    "array": (_file("a.json", make.CONTENT["corpora/array.json"]), documents),
    "objects": (_file("a.jsonl", make.CONTENT["corpora/pretty.jsonl"]), documents),
    "CSV": (_file("a.csv", make.CONTENT["corpora/sep.csv"]), documents),
    "TSV": (_file("a.tsv", make.CONTENT["corpora/data.tsv"]), documents),
    "parquet": (_file("a.parquet", make.CONTENT["corpora/data.parquet"]), documents),
    "arrow": (_file("a.arrow", make.CONTENT["corpora/data-00000-of-00001.arrow"]), documents),
    "zstandard": (_file("a.jsonl.zst", make.CONTENT["corpora/zst_frames.jsonl.zst"]), documents),
    "xz": (_file("a.jsonl.xz", make.CONTENT["corpora/data.jsonl.xz"]), documents),
    "requests": (_requests, requests),
    "llama2.c": (_file("a.bin", _llama2c), llama2c_file),
    "overrides": (_file("flags", FLAGS.encode), overrides),
    "prompt": (_file("prompt", lambda: "def main(\u00e9\u4e2d):".encode()), prompt),
    "checkpoint": (_checkpoint, checkpoint),
    "hostile parquet": (_file("a.parquet", make.CONTENT["corpora/data.parquet"]), documents, hostile.parquet_file),
    "hostile arrow": (_file("a.arrow", make.CONTENT["corpora/data-00000-of-00001.arrow"]), documents, hostile.arrow_file),
    "hostile templates": (_file("chat_template.jinja", b"{{ messages }}".strip), rendered, hostile.template),
    "hostile tokenizers": (_file("tokenizer.json", lambda: made.byte_level().encode()), steps, hostile.tokenizer),
}
REFUSALS = (UserError, store.Corrupt, store.Stopped)
