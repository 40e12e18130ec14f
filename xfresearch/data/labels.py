"""Labelled data sets: sequences of tokens with a label at every token. The label is not the next token.

data.corpus names one as `NAME` or `NAME:OPTION=VALUE,...`, and then has no other corpus. A labelled data set has no
text, hence no tokenizer and no bytes. Its sequences have exactly config.sequence_length tokens, without padding.

To add a data set, write a class in a new file of data/tasks/ and add a line to DATA_SETS. The class is a frozen dataclass
whose fields (options/fields.py) are its options. It is a Task, whose samples are drawn without end, or any other Labelled
(tasks/task.py).
"""

import ast
from pkgutil import resolve_name
from typing import Any

from xfresearch.data.tasks.task import Labelled
from xfresearch.options.reading import from_dict
from xfresearch.runtime.errors import require

DATA_SETS = {  # name: its class, which is imported when a run reads the data set
    "majority": "xfresearch.data.tasks.majority:Majority",
    "recall": "xfresearch.data.tasks.recall:Recall",
    "depo": "xfresearch.data.tasks.depo:Depo",
    "brevo": "xfresearch.data.tasks.brevo:Brevo",
    "mano": "xfresearch.data.tasks.mano:Mano",
    "lano": "xfresearch.data.tasks.lano:Lano",
    "capo": "xfresearch.data.tasks.capo:Capo",
}
# Fields of DataConfig that apply to text only.
TEXT_OPTIONS = ("weights", "text_field", "tokenizer", "packing", "manual_dir", "links", "shards", "workers")


def has_labels(corpus: str) -> bool:
    """Whether `corpus`, an entry of data.corpus, is a labelled data set."""
    return corpus.partition(":")[0] in DATA_SETS


def trains_on_labels(data) -> bool:
    """Whether a run on `data` (a DataConfig) predicts labels instead of next tokens."""
    return any(map(has_labels, data.corpus))


def predicts_next(data) -> bool:
    """Whether a run on `data` predicts each next token of a text: its loss has bits per byte, and it continues a text."""
    return not trains_on_labels(data) and data.objective.kind == "next"


def predicted(data) -> str:
    """What a run on `data` predicts, in words."""
    return "labels" if trains_on_labels(data) else data.objective.predicts


def open_data_set(corpus: str, length: int) -> Labelled:
    """The data set `corpus` with sequences of `length` tokens. Raises UserError if its options are invalid."""
    name = corpus.partition(":")[0]
    data_set: Labelled = from_dict(resolve_name(DATA_SETS[name]), options_of(corpus), f"config.data.corpus: {name}")
    data_set.check(length)
    return data_set


def options_of(corpus: str) -> dict[str, Any]:
    """The options of a corpus NAME:OPTION=VALUE,OPTION=VALUE. Raises UserError for another form."""
    name, _, options = corpus.partition(":")
    pairs = [pair.partition("=") for pair in options.split(",") if options]
    form = f"{name}:OPTION=VALUE,OPTION=VALUE"
    require(all(equals for _, equals, _ in pairs), "data.corpus", corpus, f"of the form {form}")
    return {option: _value(text) for option, _, text in pairs}


def _value(text: str):
    """`text` as a Python literal if it is one, otherwise unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
