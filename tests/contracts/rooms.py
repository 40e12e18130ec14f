"""Every room, as a function of a language model: each gives a result, or refuses in one line (contract 9)."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.editing.words import WordTokenizer
from xfresearch import LanguageModel, editing
from xfresearch.analysis.registry import ANALYSES
from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.outline import model_line
from xfresearch.pages.drawing import draw_block
from xfresearch.surgery.network import assemble, take_apart
from xfresearch.surgery.registry import CONVERSIONS

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
OF_CONVERSION = {"widen": {"hidden": 64}, "pool_groups": {"kv_heads": 1}}  # options that have no default


def converted(lm: LanguageModel, name: str) -> None:
    """The config and the parameters of the converted model; its certificate is tested in tests/surgery."""
    after = CONVERSIONS[name](take_apart(lm.config, lm.params), **OF_CONVERSION.get(name, {}))
    assemble(after, lm.config.param_dtype)


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


def drawn(lm: LanguageModel) -> None:
    model_line(lm.config)
    for block in lm.config.blocks.values():
        draw_block(block)


ROOMS: dict[str, Callable] = {
    "capture": captured,
    "export": exported,
    "drawing": drawn,
    "generate": lambda lm: lm.generate([1, 2, 3], max_new_tokens=2),
    "rome": lambda lm: editing.rome(lm, [REQUEST]),
    "memit": lambda lm: editing.memit(lm, [REQUEST]),
    "finetune": lambda lm: editing.finetune(lm, [REQUEST], steps=1),
}
ROOMS |= {f"convert {name}": lambda lm, name=name: converted(lm, name) for name in CONVERSIONS}
ROOMS |= {f"analyze {name}": lambda lm, name=name: analysed(lm, name) for name in ANALYSES}


def with_words(lm: LanguageModel) -> LanguageModel:
    """The model with a tokenizer of its vocabulary or less."""
    lm.tokenizer = WordTokenizer()
    return lm
