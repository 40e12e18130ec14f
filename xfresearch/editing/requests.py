"""Requests of an edit: completed and checked before anything is computed, and the memory that they edit."""

import math
import random
from collections.abc import Sequence
from typing import Any

from xfresearch.analysis.coefficients import memory_names, sublayer_of, where
from xfresearch.analysis.prompts import check_asked, prompt_of
from xfresearch.analysis.trace import CLASSES, trace
from xfresearch.analysis.tracing import of_prompt, value_of
from xfresearch.data.facts import Fact, facts_of
from xfresearch.data.given import NotGiven
from xfresearch.data.records import Record, read_record, record_of
from xfresearch.editing.scores import prompts_of
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.model_config import predicts_next
from xfresearch.models.taps import of_encoder
from xfresearch.runtime.errors import UserError, nearest

TRACED = 24  # requests that choose the memory, at most


def known_facts(lm: LanguageModel) -> list[Fact] | None:
    """The facts of the first corpus of the model's run that teaches facts; None if there is none, or if the user has not
    given its path."""
    for corpus in lm.run.data.corpus:
        if corpus == "facts" or corpus.startswith("facts:") and not isinstance(corpus, NotGiven):
            return facts_of(corpus)
    return None


def drawn(known: Sequence[Fact], count: int, seed: int = 0) -> list[Record]:
    """Requests for `count` facts, drawn without replacement. The new object is that of another fact of the relation."""
    rng = random.Random(seed)
    objects: dict[str, list[str]] = {}
    for fact in known:
        objects.setdefault(fact.relation, []).append(fact.object)
    possible = [fact for fact in known if len(set(objects[fact.relation])) > 1]
    if not 1 <= count <= len(possible):
        allowed = f"from 1 to {len(possible)}, the facts whose relation has another object"
        raise UserError(f"count={count} is not allowed: it must be {allowed}")
    chosen = rng.sample(possible, count)
    requests = []
    for fact in chosen:
        others = sorted(set(objects[fact.relation]) - {fact.object})
        requests.append(record_of(fact, known, rng.choice(others)))
    return requests


def prepared(
    lm: LanguageModel, requests: Sequence[Record | dict[str, Any]], known: Sequence[Fact] | None = None
) -> tuple[list[Record], Sequence[Fact] | None]:
    """The requests, which may be objects of a file as well, and the known facts: by default those that the model was trained
    on. Fields that a request does not give are taken from the known fact with its subject and relation: the prompt, other
    prompts, neighbours, facts that follow.

    Raises UserError for a request that cannot be made: an unknown relation or subject, an object that is missing or is the
    one before, tokens that the tokenizer cannot make."""
    if not requests:
        raise UserError("requests=[] is not allowed: there must be at least one")
    if lm.tokenizer is None:
        raise UserError("this model has no tokenizer, so it cannot read a request")
    if reason := predicts_next(lm.config):
        raise UserError(f"this model cannot be edited: {reason} (model.causal=False)")
    known = known_facts(lm) if known is None else known
    completed = []
    for number, request in enumerate(requests):
        record = read_record(f"request {number}", request)
        if not record.target_new:
            raise UserError(f"request {number}, {record.subject!r}, has no target_new: it must be the new object")
        completed.append(_completed(number, record, known))
        if completed[-1].target_new == completed[-1].target:
            what = f"target_new={record.target_new!r} is not allowed: it is the object before"
            raise UserError(f"request {number}, {completed[-1].text!r}: {what}")
        prompt_of(lm, completed[-1], completed[-1].target_new)
        for _, text, *objects in prompts_of(completed[-1]):  # of the metrics: an error now, not later
            check_asked(lm, text, objects)
    return completed, known


def _completed(number: int, record: Record, known: Sequence[Fact] | None) -> Record:
    name = f"request {number}, {record.subject!r}"
    relations = {fact.relation for fact in known or ()}
    if record.relation and known and record.relation not in relations:
        allowed = f"{nearest(record.relation, relations)} (allowed: {', '.join(sorted(relations))})"
        raise UserError(f"{name}: there is no relation {record.relation!r}{allowed}")
    for fact in known or ():
        if known and (fact.subject, fact.relation) == (record.subject, record.relation):
            given = {key: value for key, value in record._asdict().items() if value}
            return record_of(fact, known, record.target_new)._replace(**given)
    if not record.prompt:
        why = "no known fact has its subject and relation"
        if not known:
            why = "this model's data are not a corpus of facts"
        raise UserError(f"{name} has no prompt: it must have one, because {why}")
    return record


def traced(lm: LanguageModel, requests: Sequence[Record]) -> str:
    """The memory that the model's own trace of the first requests finds: where restoring its sublayer, in one layer, at the
    last token of the subject helps most (analysis/trace.py). Raises UserError if no request has an object before, or if the
    model knows none of them."""
    records = [record for record in requests if record.target]
    if not memory_names(lm.config):
        raise UserError("this model has no memory: it has neither feed-forward layers nor persistent slots")
    if not records:  # of an empty list, trace would take the model's own corpus
        raise UserError("no request has a target, the object before, which the trace of the requests needs: give --memory")
    data = trace(lm, records, count=TRACED, window=1).data
    best = {}
    for memory in memory_names(lm.config):
        number, sublayer = where(memory)
        value = value_of(lm.config, sublayer_of(lm.config, memory))
        if "." not in sublayer and of_prompt(lm.config, value):  # shared experts see all tokens: values.py
            best[memory] = data[value][number, CLASSES.index("last subject")]
    return max(best, key=best.__getitem__)


def memories_up_to(lm: LanguageModel, last: str, count: int) -> tuple[str, ...]:
    """`count` memories of the same sublayer that end with `last`, or the first `count` of them; fewer if there are fewer."""
    of_stack = [memory for memory in memory_names(lm.config) if of_encoder(memory) == of_encoder(last)]
    same = [memory for memory in of_stack if where(memory)[1] == where(last)[1]]
    start = max(0, same.index(last) + 1 - count)
    return tuple(same[start : start + count])


def memory_of(lm: LanguageModel, requests: Sequence[Record], memory: str) -> str:
    """`memory`; if it is '', the one that the model's own trace finds. Raises UserError for an unknown one."""
    return check_memories(lm, [memory])[0] if memory else traced(lm, requests)


def check_memories(lm: LanguageModel, given: Sequence[str]) -> tuple[str, ...]:
    """The names of memories. Raises UserError for an unknown one, or if they are not in the order of computation: each would
    write a share of what is missing at a layer that comes before it."""
    allowed = memory_names(lm.config)
    for memory in given:
        if memory not in allowed:
            raise UserError(f"there is no memory {memory!r}{nearest(memory, allowed)} (allowed: {', '.join(allowed)})")
    order = [allowed.index(memory) for memory in given]
    if order != sorted(set(order)):
        raise UserError(f"memories={','.join(given)} is not allowed: they must be in ascending order, each of them once")
    return tuple(given)


def check_numbers(**given: float) -> None:
    """Raises UserError for a setting of a method that is out of its range."""
    for name, value in given.items():
        least = {"ridge": 0, "tokens": 1, "steps": 1, "prompts": 0}.get(name)
        if not (math.isfinite(value) and (value > 0 if least is None else value >= least)):
            allowed = "above 0" if least is None else f"at least {least}"
            raise UserError(f"{name}={value} is not allowed: it must be a number {allowed}")
