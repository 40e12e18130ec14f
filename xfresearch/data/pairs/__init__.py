"""Corpora of pairs, a source and its target: data.objective.kind='seq2seq'. They are files, or tasks that are generated.

A corpus of pairs has `splits`, `identity()` (a JSON value that changes whenever its pairs change), `pairs(split)` (the
texts in order), and for tokenizers that are trained `documents(split)` and `n_bytes(split)`, as a corpus of text has. To
add a task, write a class like those of pair_tasks.py and add a line to TASKS.
"""

from xfresearch.data.given import require_given_corpus
from xfresearch.data.labels import options_of
from xfresearch.data.pairs.pair_files import PairFiles
from xfresearch.data.pairs.pair_tasks import PairTask, Reverse, Sort
from xfresearch.data.pairs.translation import Translation
from xfresearch.options.reading import from_dict
from xfresearch.options.run_options import DataConfig

TASKS: dict[str, type[PairTask]] = {"sort": Sort, "reverse": Reverse, "translation": Translation}


def open_pairs(corpus: str, data: DataConfig) -> PairFiles | PairTask:
    """The pairs of a corpus: NAME or NAME:OPTION=VALUE,... of a task, or a file, a directory or a glob. Raises UserError if
    there is none."""
    name = corpus.partition(":")[0]
    if name in TASKS:
        return from_dict(TASKS[name], options_of(corpus), f"config.data.corpus: {name}")
    require_given_corpus(corpus)
    path = corpus.removeprefix("text_files:")
    return PairFiles(path, data.objective.source_field, data.objective.target_field, tuple(TASKS), data.links)
