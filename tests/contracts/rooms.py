"""Every room, as a function of a language model: each gives a result, or refuses in one line (contract 9).

test_conversions.py has the conversions.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.editing.words import WordTokenizer
from xfresearch import LanguageModel, editing
from xfresearch.analysis.coefficients import places
from xfresearch.analysis.registry import ANALYSES
from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.models.words import model_line
from xfresearch.pages.drawing import draw_block

TOKENS_NL = np.random.default_rng(3).integers(14, size=(2, 8))
OTHER_NL = (TOKENS_NL + 1) % 14
REQUEST = Record("Ada", "{} is", " red", " blue")
FACT = Fact("Ada", "colour", "red", ("Ada is",), ("Bea is",))
OF_ANALYSIS = {  # data, and arguments that make it short
    "trace": ([REQUEST], {"count": 1, "samples": 1}),
    "recall": ([FACT], {}),
    "features": (TOKENS_NL, {"sizes": (8,), "k": 4, "steps": 1, "training": TOKENS_NL}),
    "tuned_lens": (TOKENS_NL, {"steps": 1, "training": TOKENS_NL}),
}


def analysed(lm: LanguageModel, name: str) -> None:
    analysis = ANALYSES[name]
    if analysis.prompts:
        analysis.run(lm, TOKENS_NL[:1], OTHER_NL[:1], (1, 2)).figures()
    else:
        data, few = OF_ANALYSIS.get(name, (TOKENS_NL, {}))
        analysis.run(lm, data, **few).figures()


def captured(lm: LanguageModel) -> None:
    lm.capture(TOKENS_NL, ["blocks.*.hook_*", "blocks.*"])


def exported(lm: LanguageModel) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lm.export_hf(Path(folder) / "out")


def at_first_memory(lm: LanguageModel, argument: str) -> dict:
    """The argument of an edit that chooses the first memory; {} for a model without one."""
    found = places(lm.config)
    return {argument: list(found[:1]) if argument == "places" else found[0]} if found else {}


def drawn(lm: LanguageModel) -> None:
    model_line(lm.config)
    for block in lm.config.blocks.values():
        draw_block(block)


ROOMS: dict[str, Callable] = {
    "capture": captured,
    "export": exported,
    "drawing": drawn,
    "generate": lambda lm: lm.generate([1, 2, 3], max_new_tokens=2),
    "rome": lambda lm: editing.rome(lm, [REQUEST], **at_first_memory(lm, "place")),
    "memit": lambda lm: editing.memit(lm, [REQUEST], **at_first_memory(lm, "places")),
    "finetune": lambda lm: editing.finetune(lm, [REQUEST], steps=1, **at_first_memory(lm, "place")),
}
ROOMS |= {f"analyze {name}": lambda lm, name=name: analysed(lm, name) for name in ANALYSES}


def with_words(lm: LanguageModel) -> LanguageModel:
    """The model with a tokenizer of its vocabulary or less."""
    lm.tokenizer = WordTokenizer()
    return lm
