"""Recorded folders as other programs and older versions wrote them: a tied tensor under another one of its names, and marks
of a version. `transformers` reads each (tests/parity/test_forms.py)."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.interop.edits import edit_tensors
from tests.interop.record import RECORDED

STACKS = ("encoder", "decoder")
EMBEDDING = "embeddings.word_embeddings.weight"
TABLES = tuple(f"{stack}.embed_tokens.weight" for stack in STACKS)


def renamed(old: str, *new: str) -> Callable[[dict], None]:
    """The tensor `old` has the names `new` alone."""
    return lambda tensors: tensors.update(dict.fromkeys(new, tensors.pop(old)))


def other_head(tensors: dict) -> None:
    """A table for each stack and another head: T5 v1.1."""
    renamed("shared.weight", *TABLES)(tensors)
    tensors["lm_head.weight"] = tensors[TABLES[0]][::-1].copy()


def marked(tensors: dict) -> None:
    tensors |= {f"{prefix}{stack}.version": np.full(1, 3, np.float32) for prefix in ("model.", "") for stack in STACKS}


# {what a folder has: (the recorded folder, the change of its tensors)}
FORMS: dict[str, tuple[str, Callable[[dict], None]]] = {
    "t5: a table in each stack": ("t5", renamed("shared.weight", *TABLES)),
    "t5: the decoder's table alone": ("t5", renamed("shared.weight", TABLES[1])),
    "t5: the head alone": ("t5", renamed("shared.weight", "lm_head.weight")),
    "t5: a table in each stack, another head": ("t5", other_head),
    "bart: marks of its version": ("bart", marked),
    "bart: a table in each stack": ("bart", renamed("model.shared.weight", *(f"model.{name}" for name in TABLES))),
    "bert: the bias of the decoder": ("bert", renamed("cls.predictions.bias", "cls.predictions.decoder.bias")),
    "bert: the weight of the decoder": ("bert", renamed(f"bert.{EMBEDDING}", "cls.predictions.decoder.weight")),
    "roberta: the bias of the decoder": ("roberta", renamed("lm_head.bias", "lm_head.decoder.bias")),
    "gpt2: the head alone": ("gpt2", renamed("transformer.wte.weight", "lm_head.weight")),
}


def write(form: str, folder: Path) -> Path:
    """The changed folder, written to `folder`."""
    name, change = FORMS[form]
    shutil.copytree(RECORDED / name, folder)
    edit_tensors(folder, change)
    return folder
