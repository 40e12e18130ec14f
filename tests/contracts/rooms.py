"""Every room, as a function of a language model: each gives a result, or refuses in one line (contract 9).

A model with an encoder gets pairs in place of rows of tokens, and the fact of a request stands in its source.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.contracts import two_stacks
from tests.contracts.two_stacks import SOURCE
from tests.contracts.variants import ALL, random_params
from tests.editing.words import WordTokenizer
from tests.tiny_runs import tiny_config
from xfresearch import LanguageModel
from xfresearch.analysis.coefficients import memory_names
from xfresearch.analysis.prompts import prompt_of
from xfresearch.analysis.registry import ANALYSES
from xfresearch.analysis.sequences import Sequences
from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.editing import METHODS
from xfresearch.editing.optimise import Settings
from xfresearch.models.context import Source
from xfresearch.models.words import model_line
from xfresearch.pages.drawing import draw_block
from xfresearch.surgery.network import assemble, take_apart
from xfresearch.surgery.registry import CONVERSIONS

# Of the models with an encoder those that are not also named configs; tests/contracts/two_stacks.py has their differences.
OF_PAIRS = {f"two stacks: {name}": model for name, model in two_stacks.MODELS.items() if name not in two_stacks.NAMED}
EVERY = ALL | OF_PAIRS
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


def model_of(name: str) -> LanguageModel:
    """A variant with random parameters, and a tokenizer of its vocabulary or less."""
    config = EVERY[name]
    of_pairs = {"source_length": SOURCE, "sequence_length": TOKENS_NL.shape[1]}
    run = tiny_config("tasks/reverse", **of_pairs) if config.encoder else tiny_config("gpt2")
    run = replace(run, model=config)
    return LanguageModel(config, random_params(config, seed=5), WordTokenizer(), run)


def read_by(lm: LanguageModel, tokens_NL: np.ndarray) -> Any:
    """The rows, or pairs with padding for a model with an encoder."""
    if lm.config.encoder is None:
        return tokens_NL
    segments_NL = np.ones_like(tokens_NL)
    segments_NL[1:, -2:] = 0
    return Sequences(tokens_NL, segments_NL, Source(tokens_NL[:, :SOURCE], segments_NL[:, -SOURCE:]))


def analysed(lm: LanguageModel, name: str) -> None:
    analysis = ANALYSES[name]
    if analysis.prompts:
        both = TOKENS_NL[:1], OTHER_NL[:1]
        source = {"source": [each[:, :SOURCE] for each in both]} if lm.config.encoder else {}
        analysis.run(lm, *both, (1, 2), **source).elements()
    else:
        data, few = OF_ANALYSIS.get(name, (TOKENS_NL, {}))
        rows = {id(TOKENS_NL): read_by(lm, TOKENS_NL)}  # others are facts
        few = {option: rows.get(id(value), value) for option, value in few.items()}
        analysis.run(lm, rows.get(id(data), data), **few).elements()


def traced(lm: LanguageModel) -> None:
    """A trace of a fact that the model is taken to know: only predicted objects are traced."""
    target = prompt_of(lm, REQUEST).target[0]
    known = mock.Mock(side_effect=lambda model, params, tokens, last: np.full(len(last), target))
    with mock.patch.object(import_module("xfresearch.analysis.trace"), "_likeliest", known):
        analysed(lm, "trace")


def edited(lm: LanguageModel, name: str) -> None:
    """An edit at the first memory, if there is one. What the model writes itself is no text of words, so the prefixes are
    given."""
    first = memory_names(lm.config)[:1]
    at = {"memories": first} if name == "memit" else {"memory": "".join(first)}
    if name.endswith("finetune"):
        METHODS[name](lm, [REQUEST], **at, steps=1)
    else:
        with mock.patch.object(import_module(f"xfresearch.editing.{name}"), "prefixes_of", lambda lm, seed: ["", "Bea. "]):
            METHODS[name](lm, [REQUEST], **at, settings=Settings(steps=2), tokens=64)


def captured(lm: LanguageModel) -> None:
    if lm.config.encoder:
        lm.capture(TOKENS_NL, ["encoder.blocks.*", "decoder.blocks.*"], source=TOKENS_NL[:, :SOURCE])
    else:
        lm.capture(TOKENS_NL, ["blocks.*.hook_*", "blocks.*"])


def generated(lm: LanguageModel) -> None:
    lm.generate(**({"source": [1, 2, 3]} if lm.config.encoder else {"prompt": [1, 2, 3]}), max_new_tokens=2)


def exported(lm: LanguageModel) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lm.export_hf(Path(folder) / "out")


def drawn(lm: LanguageModel) -> None:
    model_line(lm.config)
    for block in lm.config.blocks.values():
        draw_block(block)


def converted(lm: LanguageModel, name: str, **options) -> None:
    """The parameters of a converted model. Whether it computes the same function is tested in tests/surgery/."""
    assemble(CONVERSIONS[name](take_apart(lm.config, lm.params), **options), "float32")


ROOMS: dict[str, Callable[[LanguageModel], object]] = {
    "capture": captured,
    "generate": generated,
    "export": exported,
    "drawing": drawn,
    **{f"analyze {name}": lambda lm, name=name: analysed(lm, name) for name in ANALYSES},
    "analyze trace": traced,
    **{f"edit {name}": lambda lm, name=name: edited(lm, name) for name in METHODS},
}
ROOMS |= {
    f"convert {name}": lambda lm, name=name: converted(lm, name, **OF_CONVERSION.get(name, {})) for name in CONVERSIONS
}
SLOW = {"patching", "trace", "features", "lens", "tuned_lens", *METHODS}
QUICK = [room for room in ROOMS if room.split()[-1] not in SLOW]
