"""MEMIT: many facts at once, in the values of several layers (Meng et al. 2023).

For each subject, a vector is added to the residual stream after the last of the layers, at the last token of the subject,
so that the model predicts the new object (optimise.py): z is the stream with it. Requests about one subject share a vector
that predicts the object of each: they have one key, and vectors of their own would be averaged. Then, layer by layer from
the first, the values change so that the keys of all subjects write a share of what the stream still lacks,
1 / (number of layers left). Keys and streams are computed again after each layer.

A subject has a key after each prefix (keys.py). The published code changes the values for the mean of these keys, so a
single key writes another vector than was asked. Here the error of the written vector is averaged over the keys (key="each"):
more edits hold, with the same C and weight (docs/questions/where_is_a_fact.md).

In a block with a norm after the sum (post-norm) the stream is the sum before this norm: what a memory writes is added there.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from xfresearch.analysis.coefficients import written_by
from xfresearch.analysis.prompts import prompt_of
from xfresearch.data.facts import Fact
from xfresearch.data.records import Record
from xfresearch.editing import report
from xfresearch.editing.keys import RIDGE, TOKENS, covariance, keys_of, prefixes_of, ridged
from xfresearch.editing.optimise import Settings, delta_for
from xfresearch.editing.report import Edit
from xfresearch.editing.requests import check_memories, check_numbers, memories_up_to, prepared, traced
from xfresearch.editing.texts import check_fit, fitting
from xfresearch.editing.values import Values, memit_change, values_of, with_change
from xfresearch.models.connections.connection import ONE
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import stage

LAYERS = 2  # by default: the traced one and the one before it, or the first two
KEYS = ("each", "mean")
WEIGHT = 0.2  # of other keys; published: 15,000 for the 16,384 coefficients of GPT-J, 20,000 for 6,400 of GPT-2 XL
SETTINGS = Settings(largest=2.0)  # published: 0.75 and rate 0.1; in configs/facts.py the new object stays unlikely with them


def memit(
    lm,
    requests: Sequence[Record | dict],
    memories: Sequence[str] = (),
    data: str = "",
    tokens: int = TOKENS,
    key: str = "each",
    weight: float = WEIGHT,
    ridge: float = RIDGE,
    settings: Settings = SETTINGS,
    seed: int = 0,
    known: Sequence[Fact] | None = None,
    alone: bool = False,
    prompts: int = 0,
):
    """(edited model, report.Report) for requests with target_new, all at once.

    memories: in ascending order, such as 'blocks.3.feed_forward'; by default the one that the model's own trace
    finds and the one before it, or the first two. data, tokens: the corpus and the tokens of C (keys.py). key: 'each' or
    'mean', see above. weight: of the keys of the corpus against one request, divided by the number of coefficients: with 1
    and no other request, about half of what is asked is written for a key like those of the corpus. ridge: as in rome.
    known, alone, prompts: as in
    report.Asked. Raises UserError for requests that cannot be made, and for a model that normalises what
    the memory writes before it is added to the stream."""
    if key not in KEYS:
        raise UserError(f"key={key!r} is not allowed: it must be one of {', '.join(KEYS)}")
    check_numbers(prompts=prompts, tokens=tokens, weight=weight, ridge=ridge)
    requests, known = prepared(lm, requests, known)
    memories = check_memories(lm, memories) or memories_up_to(lm, traced(lm, requests), LAYERS)
    for memory in memories:
        stream_site(lm, memory)  # its error, before the long computations
    prefixes = prefixes_of(lm, seed)
    check_fit(lm, requests, prefixes)
    C = {memory: ridged(covariance(lm, memory, data, tokens), ridge) for memory in memories}
    edit = partial(_edited, memories=memories, C=C, prefixes=prefixes, key=key, weight=weight, settings=settings)
    about = {"key": key, "weight": weight, "ridge": ridge, **settings._asdict()}
    return report.of(lm, requests, edit, "memit", about, report.Asked(known, alone, prompts))


def _edited(lm, requests, memories, C: dict[str, np.ndarray], prefixes, key: str, weight: float, settings: Settings):
    """The edited model, and the edits."""
    site = stream_site(lm, memories[-1])
    of_subject: dict[str, list[Record]] = {}
    for record in requests:
        of_subject.setdefault(record.subject, []).append(record)
    with stage("MEMIT, the streams", len(requests), "requests") as progress:
        deltas = {}
        for subject, records in of_subject.items():
            deltas[subject] = delta_for(lm, memories[-1], records, prefixes, settings, site)
            progress.update(len(records))
    deltas_ND = np.stack([deltas[record.subject].delta_D for record in requests])
    wanted_ND = streams(lm, memories[-1], site, requests) + deltas_ND
    edited, norms = lm, []
    with stage("MEMIT, the layers", len(memories), "layers") as progress:
        for left, memory in zip(range(len(memories), 0, -1), memories, strict=True):
            keys_NJHM = np.stack([keys_of(edited, memory, record, prefixes) for record in requests])
            asked_ND = (wanted_ND - streams(edited, memories[-1], site, requests)) / left
            values = values_of(edited, memory)
            change = change_for(values, C[memory], keys_NJHM, asked_ND, key, weight)
            edited = with_change(edited, memory, change)
            norms.append(float(np.linalg.norm(change) / np.linalg.norm(values.values_GMV)))
            progress.update(1)
    pairs = [(record, deltas[record.subject]) for record in requests]
    return edited, [Edit(record, memories, tuple(norms), each.losses, each.probability) for record, each in pairs]


def change_for(values: Values, C_GMM: np.ndarray, keys_NJHM: np.ndarray, asked_ND: np.ndarray, key: str, weight: float):
    """The change [G, M, V] with which the J keys of each request write the vectors asked_ND (values.py). The error is the
    mean over a request's keys of |written - asked|^2, or for key='mean' the error of the mean key. The mean of m^T C^-1 m
    over a corpus is the number of coefficients M, hence a = M weight."""
    if key == "mean":
        keys_NJHM = keys_NJHM.mean(1, keepdims=True)
    N, J, H, M = keys_NJHM.shape
    return memit_change(values, C_GMM, keys_NJHM.reshape(N * J, H, M), np.repeat(asked_ND, J, 0), J * M * weight)


def stream_site(lm, memory: str) -> str:
    """The site where what the memory writes is added to the stream. Raises UserError if it is not added unchanged."""
    (sublayer,) = (each for each in lm.config.sublayers() if each.path == written_by(memory))
    connection = sublayer.connection
    if sublayer.norm("out") or connection.gain != ONE or connection.adds_to not in ("stream", "block"):
        raise UserError(f"memit is not allowed with {memory}: what it writes is not added to the stream unchanged")
    return "sum" if sublayer.norm("post") else "residual"


def streams(lm, memory: str, site: str, requests: Sequence[Record]) -> np.ndarray:
    """[N, D] in float64: the stream at the last token of each subject, without a prefix."""
    tap = f"{written_by(memory)}.{site}"
    stream_ND = []
    for record in requests:
        prompt = prompt_of(lm, record, record.target_new)._replace(target=())
        row = fitting(lm, [prompt])[0]
        stream_ND.append(np.asarray(lm.capture(names=tap, **row.arguments())[tap][0, prompt.last], np.float64))
    return np.stack(stream_ND)
