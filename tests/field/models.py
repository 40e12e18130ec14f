"""Tiny models with random parameters, as programs of other years wrote them: the bytes of the files of their folders."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tests.contracts.variants import random_params
from tests.interop.edits import WEIGHTS, edit_config, edit_tensors
from tests.interop.forms import FORMS
from tests.tiny_runs import tiny_config
from xfresearch.loading.language_model import LanguageModel

HEADS = {"attention__heads": 2, "attention__head_size": 4}
BLOCK = {f"model__blocks__main__{key}": value for key, value in (HEADS | {"feed_forward__hidden": 8}).items()}
SMALL = {"model__width": 8, "model__depth": 1, "model__max_length": 16, "sequence_length": 16, **BLOCK}
OF_ENCODER = {key.replace("model__", "model__stacks__encoder__"): value for key, value in SMALL.items() if "model__" in key}
CROSS = {"model__blocks__main__cross_attention__heads": 2, "model__blocks__main__cross_attention__head_size": 4}
OF_PAIRS = SMALL | OF_ENCODER | CROSS | {"source_length": 16}
SIZES = {"gpt2": SMALL, "bert": SMALL, "t5": OF_PAIRS, "bart": OF_PAIRS}
VOCABULARY = 23


def of_form(form: str) -> tuple[str, Callable[[dict], None], dict]:
    return *FORMS[form], {}


def classifier(tensors: dict) -> None:
    tensors["score.weight"] = np.ones((2, 8), np.float32)


# {folder: (config, change of the tensors, changes of config.json)}
FOLDERS: dict[str, tuple[str, Callable[[dict], None], dict]] = {
    "t5_no_shared": of_form("t5: a table in each stack"),
    "bart_version": of_form("bart: marks of its version"),
    "bert_decoder_bias": of_form("bert: the bias of the decoder"),
    "bert_2019": ("bert", lambda tensors: None, {"model_type": None, "architectures": None}),
    "classifier": ("gpt2", classifier, {"architectures": ["GPT2ForSequenceClassification"]}),
}


@cache
def files(folder: str) -> dict[str, bytes]:
    """The files of a folder."""
    name, change, keys = FOLDERS[folder]
    run = tiny_config(name, **SIZES[name])
    model = replace(run.model, vocab_size=VOCABULARY)
    with TemporaryDirectory() as temporary:
        out = Path(temporary) / folder
        LanguageModel(model, random_params(model), None, run).export_hf(out)
        edit_tensors(out, change)
        edit_config(out, **keys)
        config = json.dumps(json.loads((out / "config.json").read_text()), indent=2) + "\n"
        return {"config.json": config.encode(), WEIGHTS: (out / WEIGHTS).read_bytes()}


CONTENT: dict[str, Callable[[], bytes]] = {
    f"models/{folder}/{file}": lambda folder=folder, file=file: files(folder)[file]
    for folder in FOLDERS
    for file in ("config.json", WEIGHTS)
}
