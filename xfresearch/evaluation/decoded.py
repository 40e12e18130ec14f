"""Texts that a model with an encoder decodes from held-out sources, against their targets: exact match, BLEU, chrF.

Decoding is greedy. Exact match is the share of texts that equal their target. BLEU (Papineni et al. 2002) and chrF (Popovic
2015) are those of sacrebleu, whose signatures say how they are computed: they are comparable with published figures.
"""

import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from xfresearch.data.pairs.pair_splits import encode, is_empty, texts_of
from xfresearch.models.context import Source
from xfresearch.models.model_config import longest_sequence
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError, nearest

BATCH = 64  # by default


class Decoded(NamedTuple):
    """Texts of N pairs."""

    sources: list[str]
    targets: list[str]
    outputs: list[str]


def metrics_of(text: str) -> list[str]:
    """The names in a text such as 'exact_match,bleu'. Raises UserError for an unknown one, or if sacrebleu is needed and not
    installed."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in SCORES:
            allowed = f"names separated by commas of {', '.join(SCORES)}{nearest(name, SCORES)}"
            raise UserError(f"--decode={text} is not allowed: it must be {allowed}")
    if set(names) - {"exact_match"} and importlib.util.find_spec("sacrebleu") is None:
        install = "pip install 'xfresearch[eval]', or in a checkout -r requirements/eval.txt"
        raise UserError(f"--decode={text} needs sacrebleu, which is not installed: {install}")
    return names


def check(run: Config) -> None:
    """Raises UserError for the run of a model that was not trained on pairs."""
    if run.data.objective.kind != "seq2seq":
        raise UserError("--decode is not allowed: the model was not trained with data.objective.kind='seq2seq'")


def decode(lm, corpus: str = "", split: str = "", limit: int = 0, batch_size: int = 0, progress=lambda n: None) -> Decoded:
    """Decodes the sources of a split (by default the run's held-out one) greedily, `limit` of them (0: all). Raises
    UserError for a model that was not trained on pairs.

    A source or a target that is longer than the run's lengths, or empty, is left out, as in training, and a text may be as
    long as the longest target.
    """
    check(lm.run)
    run, tokenizer = lm.run, lm.tokenizer
    split = split or run.evaluation.split
    corpus = corpus or run.data.corpus[0]
    texts = texts_of(corpus, split, run.data).pairs(split)
    lengths = run.source_length, run.sequence_length
    coded = ((pair, encode(tokenizer, pair)) for pair in texts if not is_empty(pair))
    chosen = list(islice(((pair, ids.source) for pair, ids in coded if ids.fits(*lengths)), limit or None))
    if not chosen:
        raise UserError(f"corpus {corpus!r}, split {split!r}: it has no pair that fits the lengths of the run")
    outputs: list[str] = []
    size = min(batch_size or BATCH, len(chosen))
    rows = longest_sequence(lm.config)
    longest = min(run.sequence_length, rows - 1) if rows else run.sequence_length  # the first row is of the decoder's start
    for first in range(0, len(chosen), size):
        ids = [source for _, source in chosen[first : first + size]]
        source = _padded(ids, size, run.source_length)
        outputs += lm.generate(source=source, max_new_tokens=longest, temperature=0.0)[: len(ids)]
        progress(len(ids))
    sources, targets = ([pair[side].decode("utf-8", "replace") for pair, _ in chosen] for side in (0, 1))
    return Decoded(sources, targets, outputs)


def _padded(sources: Sequence[np.ndarray], rows: int, length: int) -> Source:
    """Sources of one shape for all batches, so that one program is compiled. Rows that are missing repeat the last one."""
    tokens_BS, segments_BS = np.zeros((2, rows, length), np.int32)
    for row in range(rows):
        source = sources[min(row, len(sources) - 1)]
        tokens_BS[row, : len(source)], segments_BS[row, : len(source)] = source, 1
    return Source(tokens_BS, segments_BS)


def score(decoded: Decoded, metrics: Sequence[str]) -> dict[str, Any]:
    """{metric: its value, in percent for BLEU and chrF as published}, and `signatures` of sacrebleu's. Exact match has a
    standard error, over the pairs."""
    results: dict[str, Any] = {"pairs": len(decoded.targets)}
    for name in metrics:
        results |= SCORES[name](decoded.outputs, decoded.targets)
    return results


def _exact_match(outputs: list[str], targets: list[str]) -> dict[str, Any]:
    share = sum(output == target for output, target in zip(outputs, targets, strict=True)) / len(targets)
    return {"exact_match": share, "exact_match_standard_error": math.sqrt(share * (1 - share) / len(targets))}


def _of_sacrebleu(name: str, outputs: list[str], targets: list[str]) -> dict[str, Any]:
    from sacrebleu import metrics

    metric = getattr(metrics, name.upper())()
    return {name: metric.corpus_score(outputs, [targets]).score, f"{name}_signature": str(metric.get_signature())}


SCORES: dict[str, Callable[[list[str], list[str]], dict[str, Any]]] = {"exact_match": _exact_match}
SCORES |= {name: partial(_of_sacrebleu, name) for name in ("bleu", "chrf")}
