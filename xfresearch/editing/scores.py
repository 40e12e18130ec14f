"""Scores of a model on the facts that an edit should change, and on the facts that it should not change.

Of a request with the object o and the new object n, by prompt:

    efficacy       the request's own prompt
    paraphrase     its other prompts
    neighbourhood  prompts of other facts with the object o, which the edit must keep
    ripple         prompts of facts that follow from the edited one, and their objects after and before it in place of n and
    o

and for each, as means over the prompts of a request (Meng et al. 2022, section 3.4, and their code):

    score           share of the prompts with P(n) > P(o); for the neighbourhood P(o) > P(n). P is the geometric mean of the
                    probabilities of an object's tokens
    magnitude       P(n) - P(o), for the neighbourhood P(o) - P(n)
    teacher forced  share of the tokens of n that are the most likely ones, each after the right tokens before it: the
                    accuracy that papers on zsRE print; for the neighbourhood of o
    generated       share of the prompts after which the model generates n, greedily and whole; for the neighbourhood o

S is the harmonic mean of the three scores. Of texts that the model generates after the prompts of a request:

    entropy      2/3 and 4/3 of the entropies of their bigrams and trigrams of words, in bits, averaged: low if they repeat
                 themselves
    consistency  cosine of their tf-idf vector and that of the references: texts about other subjects with the object n

Intervals are bootstrap intervals over requests (percentiles of 2,000 resamples).
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from xfresearch.analysis.recall import score
from xfresearch.data.records import Record
from xfresearch.models.inputs import encode
from xfresearch.models.model_config import longest_sequence
from xfresearch.models.sampling import NO_RULES
from xfresearch.runtime.summaries import bootstrap_interval, mean_of_known

SCORED = ("efficacy", "paraphrase", "neighbourhood")  # what S is made of
KINDS = (*SCORED, "ripple")
MEASURES = ("score", "magnitude", "teacher forced", "generated")
TOKENS, TOP_K = 100, 5  # of generated texts, as in the published code
TEXTS = 3  # of a request


class Measured(NamedTuple):
    """Of N requests. NaN where a request has no such prompts."""

    values: dict[str, np.ndarray]  # {'efficacy, score': [N]} of KINDS and MEASURES, 'entropy', 'consistency'
    new: np.ndarray  # [N]: probability of the new object after the request's own prompt, over all its tokens
    old: np.ndarray  # the same of the object before; NaN without one
    texts: tuple[tuple[str, ...], ...] = ()  # that the model generates for each request


def measure(lm, requests: Sequence[Record], generate: bool = True, seed: int = 0, prompts: int = 0) -> Measured:
    """The measures of each request. Without `generate` no texts are generated. prompts: as in `prompts_of`."""
    asked = [(number, *prompt) for number, record in enumerate(requests) for prompt in prompts_of(record, prompts)]
    rows = [(prompt, wanted) for _, _, prompt, wanted, _ in asked] + [(prompt, other) for *_, prompt, _, other in asked]
    known = [bool(wanted and other) for *_, wanted, other in asked]
    filled = [(prompt, object_ or "?") for prompt, object_ in rows]
    scored = score(lm, [prompt for prompt, _ in filled], [object_ for _, object_ in filled], "facts")
    likely = np.exp(scored.log_probability / scored.tokens)
    wanted, other = np.where([known, known], likely.reshape(2, -1), np.nan)
    measured = {
        "score": np.where(known, wanted > other, np.nan),
        "magnitude": wanted - other,
        "teacher forced": np.where([bool(row[3]) for row in asked], scored.right[: len(asked)], np.nan),
        "generated": np.where([bool(row[3]) for row in asked], scored.recalled[: len(asked)], np.nan),
    }
    of_kind: dict[str, list[list[int]]] = {kind: [[] for _ in requests] for kind in KINDS}  # rows of each request
    for row, (number, kind, *_) in enumerate(asked):
        of_kind[kind][number].append(row)
    values = {}
    for kind, of_requests in of_kind.items():
        for name, value in measured.items():
            values[f"{kind}, {name}"] = np.array([mean_of_known(value[rows]) for rows in of_requests])
    own = [row for (row,) in of_kind["efficacy"]]
    new = np.exp(scored.log_probability[own])
    old = np.exp(scored.log_probability[len(asked) :][own])
    old[[not record.target for record in requests]] = np.nan
    texts = _generated(lm, requests, seed) if generate else [[] for _ in requests]
    if generate:
        values["entropy"] = np.array([entropy(each) for each in texts])
        values["consistency"] = consistency(texts, [record.references for record in requests])
    return Measured(values, new, old, tuple(map(tuple, texts)))


def prompts_of(record: Record, most: int = 0) -> list[tuple[str, str, str, str]]:
    """(kind, prompt, right object after the edit, wrong object) of a request: the first `most` prompts of each kind, 0 for
    all."""
    first = slice(most or None)
    asked = [("efficacy", record.text, record.target_new, record.target)]
    asked += [("paraphrase", text, record.target_new, record.target) for text in record.paraphrases[first]]
    asked += [("neighbourhood", text, answer, record.target_new) for text, answer in record.neighbours[first]]
    return asked + [("ripple", text, after, before) for text, after, before in record.consequences[first]]


def joined(parts: Sequence[Measured], requests: Sequence[Record]) -> Measured:
    """The measures of requests that were measured one by one."""
    values = {name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values}
    texts = tuple(text for part in parts for text in part.texts)
    if "consistency" in values:  # its document frequencies are those of all requests
        values["consistency"] = consistency(texts, [record.references for record in requests])
    new, old = (np.concatenate([getattr(part, name) for part in parts]) for name in ("new", "old"))
    return Measured(values, new, old, texts)


def summary(measured: Measured) -> dict[str, tuple[float, float, float]]:
    """{name: (mean over requests, ends of its 95 % interval)} of all measures, S first."""
    scores = [measured.values[f"{kind}, score"] for kind in SCORED]
    intervals = {"S": bootstrap_interval(harmonic, *scores)}
    return intervals | {name: bootstrap_interval(mean_of_known, value) for name, value in measured.values.items()}


def harmonic(*scores) -> float:
    """The harmonic mean of the means of the scores; NaN if one is not known."""
    means = [float(mean_of_known(each)) for each in scores]
    if not all(mean == mean for mean in means):
        return math.nan
    return len(means) / sum(1 / mean for mean in means) if all(means) else 0.0


def _generated(lm, requests: Sequence[Record], seed: int) -> list[list[str]]:
    """Texts that begin with the prompts of each request, with the prompts, which an encoder reads."""
    prompts = [(record.text, *record.paraphrases)[:TEXTS] for record in requests]
    flat = [text for texts in prompts for text in texts]
    length = 1 if lm.config.encoder else max(len(encode(lm.config, lm.tokenizer, text, "prompt")) for text in flat)
    longest = longest_sequence(lm.config)
    room = min(TOKENS, longest - length) if longest else TOKENS
    if room < 1:
        return [[] for _ in requests]
    seeds = [seed + number for texts in prompts for number in range(len(texts))]
    how: dict = {"max_new_tokens": room, "temperature": 1.0, "top_k": TOP_K, "top_p": 1.0, "seed": seeds}
    how |= vars(NO_RULES)  # not those of the model's folder
    written = iter(lm.generate(source=flat, **how) if lm.config.encoder else lm.generate(flat, **how))
    joint = " " if lm.config.encoder else ""
    return [[f"{text}{joint}{next(written)}" for text in texts] for texts in prompts]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def entropy(texts: Sequence[str]) -> float:
    """The weighted n-gram entropy of texts, in bits: the mean over texts of (2/3 H_2 + 4/3 H_3) / 2; NaN without texts."""
    entropies = []
    for text in texts:
        words = _words(text)
        total = 0.0
        for size, weight in ((2, 2 / 3), (3, 4 / 3)):
            counts = Counter(zip(*(words[n:] for n in range(size)), strict=False))
            p = np.array(list(counts.values()), float) / max(1, counts.total())
            total -= weight * float((p * np.log2(p)).sum())
        entropies.append(total / 2)
    return float(np.mean(entropies)) if entropies else math.nan


def consistency(texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> np.ndarray:
    """[N]: the cosine of the tf-idf vectors of each request's texts and references, each joined; NaN without references. The
    inverse document frequencies, ln((1 + n) / (1 + df)) + 1, are those of the n requests' references."""
    documents = [Counter(_words(" ".join(each))) for each in references]
    frequency = Counter(word for document in documents for word in document)
    weight = {word: math.log((1 + len(documents)) / (1 + count)) + 1 for word, count in frequency.items()}

    def vector(counts: Counter) -> dict[str, float]:
        weighted = {word: count * weight[word] for word, count in counts.items() if word in weight}
        norm = math.sqrt(sum(value**2 for value in weighted.values())) or 1.0
        return {word: value / norm for word, value in weighted.items()}

    cosines = []
    for of_request, document in zip(texts, documents, strict=True):
        a, b = vector(Counter(_words(" ".join(of_request)))), vector(document)
        cosines.append(sum(value * b.get(word, 0.0) for word, value in a.items()) if b and of_request else math.nan)
    return np.array(cosines)
