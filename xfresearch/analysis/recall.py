"""Which facts does the model know? A fact is recalled if the most likely continuation of a prompt is its object.

    recalled     every token of the object is the most likely one, given the prompt and the tokens before it (greedy)
    probability  of the object: the product over its tokens

With an encoder a prompt is the source, and the object begins the target. Both on the prompts of training and on the held-out
paraphrases, as means over the prompts of a fact, then over facts. By chance: the share of the relation's most frequent
object, which a model recalls that knows the relation but no fact.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xfresearch.analysis.prompts import prompt_tokens
from xfresearch.analysis.registry import analysis
from xfresearch.analysis.result import Result
from xfresearch.analysis.sequences import Sequences
from xfresearch.data.facts import Fact, facts_of
from xfresearch.data.subjects import continued
from xfresearch.models.context import Source
from xfresearch.models.inputs import encode, forward
from xfresearch.models.model_config import ModelConfig, check_length, longest_sequence, predicts_next
from xfresearch.models.sources import source_of, target_ids
from xfresearch.models.words import model_line
from xfresearch.pages.figures import HeatMap, Table, table
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.progress import stage
from xfresearch.runtime.summaries import mean_interval, mean_of_known
from xfresearch.runtime.tables import PLUS_MINUS

BATCH = 64
KINDS = {"prompts": "trained", "held_out": "held out"}  # fields of a fact: their names in tables


class Scores(NamedTuple):
    """Scores of a model's continuations of N prompts."""

    recalled: np.ndarray  # bool [N]: every token of the object is the most likely one
    log_probability: np.ndarray  # float64 [N]: of the object, in nats
    right: np.ndarray  # float64 [N]: share of the object's tokens that are the most likely one
    tokens: np.ndarray  # int [N]: of the object


@analysis(predicts_next, "which facts the model knows, in sentences of training and in others")
def recall(lm, facts: Sequence[Fact] | None = None, data: str | None = None, count: int | None = None) -> Result:
    """Recall and probability of `facts`; by default those of the corpus `data`, facts or facts:PATH, which by default is
    the first of the model's run. With `count`, of the first ones alone.

    .data: recalled, probability, recalled_held_out, probability_held_out [facts], means over the prompts of a fact; relation
    [facts], the number of its relation in the order of the table. The intervals of .summary and of the table are over facts.
    Raises UserError for a corpus without facts, and for a model without a tokenizer."""
    corpus = data or lm.run.data.corpus[0]
    known = list(facts_of(corpus) if facts is None else facts)[:count]
    if not known:
        raise UserError("facts=[] is not allowed: it must have at least one fact")
    relations = list(dict.fromkeys(fact.relation for fact in known))
    arrays: dict[str, np.ndarray] = {"relation": np.array([relations.index(fact.relation) for fact in known])}
    measured = _of_facts(lm, known)
    for field, name in (("prompts", ""), ("held_out", "_held_out")):
        arrays["recalled" + name] = measured[field][0]
        arrays["probability" + name] = measured[field][1]
    summary = {name.replace("_", " "): mean_interval(value) for name, value in arrays.items() if name != "relation"}
    line = f"{model_line(lm.config, lm.run.sequence_length)}; step {lm.step}; {len(known):,} facts of "
    line += "the given ones" if facts is not None else corpus
    tables = (_table(known, relations, arrays),)
    return Result("recall", line, lm.step, arrays, summary, (_picture(relations, arrays),), tables)


def score(lm, prompts: Sequence[str], objects: Sequence[str], title: str = "recall") -> Scores:
    """Scores of the object of the same index as the continuation of each prompt (data/subjects.py).

    Texts are padded to few different shapes, so that calls share compiled programs. Raises UserError for a model without a
    tokenizer, and for texts that are longer than its table of positions."""
    rows, source = _rows(lm, prompts, objects)
    longest = _rounded(max(len(ids) - start for ids, start in rows), 4)
    length = max(len(ids) for ids, _ in rows)
    check_length(lm.config, length)
    length = min(_rounded(length, 8), longest_sequence(lm.config) or sys.maxsize)
    tokens_NL = np.zeros((len(rows), length), np.int32)
    for row, (ids, _) in enumerate(rows):
        tokens_NL[row, : len(ids)] = ids
    lengths_N2 = np.array([(start, len(ids)) for ids, start in rows])
    batch = min(BATCH, 1 << (len(rows) - 1).bit_length())
    parts = []
    with stage(title, len(rows), "prompts") as progress:
        for first in range(0, len(rows), batch):
            chosen = np.minimum(np.arange(first, first + batch), len(rows) - 1)  # the last batch repeats its last row
            of_batch = jax.tree.map(lambda leaf, chosen=chosen: leaf[chosen], (tokens_NL, lengths_N2, source))
            parts.append(_score(lm.config, longest, lm.params, *of_batch))
            progress.update(min(batch, len(rows) - first))
    right, log_p = (np.concatenate([np.asarray(part[n]) for part in parts])[: len(rows)] for n in (0, 1))
    tokens = np.diff(lengths_N2)[:, 0]
    return Scores(right == tokens, log_p.astype(np.float64), right / tokens, tokens)


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _rows(lm, prompts: Sequence[str], objects: Sequence[str]) -> tuple[list[tuple[list[int], int]], Source | None]:
    """The tokens of each row, the index of the object's first one, and the source of a model with an encoder."""
    if lm.config.encoder is None:
        return [_tokens(lm, prompt, object_) for prompt, object_ in zip(prompts, objects, strict=True)], None
    given = source_of(lm.config, lm.tokenizer, list(prompts), len(objects))
    assert given is not None
    longest = _rounded(given.tokens_BS.shape[1], 8)
    own = Sequences(np.asarray(given.tokens_BS), given.segments_BS)
    both = (np.pad(x, ((0, 0), (0, longest - x.shape[1]))).astype(np.int32) for x in (own.tokens_NL, own.real_NL))
    return [(target_ids(lm.config, lm.tokenizer, object_), 1) for object_ in objects], Source(*both)


def _tokens(lm, prompt: str, object_: str) -> tuple[list[int], int]:
    """The tokens of prompt and object, and the index of the first one that is not the prompt's alone."""
    before = prompt_tokens(lm, prompt)
    ids = encode(lm.config, lm.tokenizer, continued(prompt, object_), "prompt and object")
    same = [a == b for a, b in zip(before, ids, strict=False)]
    start = same.index(False) if False in same else len(before)
    if not start:
        raise UserError(f"prompt={prompt!r} is not allowed: it must have a token in front of the object")
    return ids, start


@partial(jax.jit, static_argnums=(0, 1))
def _score(model: ModelConfig, longest: int, params: dict, tokens_BL, lengths_B2, source):
    """How many tokens are the most likely ones [B], and the log probability [B] of the objects, which have at most `longest`
    tokens. lengths_B2: numbers of tokens before the object, and with it. source: None without an encoder."""
    start_B1, end_B1 = lengths_B2[:, :1], lengths_B2[:, 1:]
    segments_BL = (jnp.arange(tokens_BL.shape[1]) < end_B1).astype(jnp.int32)
    lm, out = forward(model, params, tokens_BL, segments_BL=segments_BL, source=source)
    at_BO = start_B1 + jnp.arange(longest)
    is_object_BO = at_BO < end_B1
    at_BO = jnp.minimum(at_BO, tokens_BL.shape[1] - 1)
    target_BO = jnp.take_along_axis(tokens_BL, at_BO, 1)
    # The token at a position is predicted one before it: only these positions need logits.
    logits_BOV = lm.logits(jnp.take_along_axis(out.hidden_BLD, at_BO[..., None] - 1, 1))
    right_BO = logits_BOV.argmax(-1) == target_BO
    log_p_BO = jnp.take_along_axis(jax.nn.log_softmax(logits_BOV), target_BO[..., None], 2)[..., 0]
    return (right_BO & is_object_BO).sum(1), jnp.where(is_object_BO, log_p_BO, 0.0).sum(1)


def _of_facts(lm, known: list[Fact]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{field: (recalled [facts], probability [facts])}, means over the prompts of each fact; NaN for a fact without any."""
    asked = [(number, field, text) for number, fact in enumerate(known) for field in KINDS for text in getattr(fact, field)]
    scores = score(lm, [text for _, _, text in asked], [known[number].object for number, _, _ in asked])
    means = {}
    for field in KINDS:
        chosen = np.array([row for row, (_, of, _) in enumerate(asked) if of == field], int)
        of_fact = np.array([asked[row][0] for row in chosen], int)
        count = np.bincount(of_fact, minlength=len(known)).astype(float)
        count[count == 0] = np.nan
        values = scores.recalled[chosen], np.exp(scores.log_probability[chosen])
        means[field] = tuple(np.bincount(of_fact, value, len(known)) / count for value in values)
    return means


def _table(known: list[Fact], relations: list[str], data: dict) -> Table:
    columns = ("relation", "facts", "recalled", "+-", "held out", "+-", "probability", "held out", "by chance")
    lines = []
    for number, relation in enumerate(relations):
        of = data["relation"] == number
        objects = Counter(fact.object for fact in known if fact.relation == relation)
        recalled, held_out = (mean_interval(data[name][of]) for name in ("recalled", "recalled_held_out"))
        probabilities = (mean_of_known(data[name][of]) for name in ("probability", "probability_held_out"))
        by_chance = max(objects.values()) / int(of.sum())
        lines.append((relation, int(of.sum()), *recalled, *held_out, *probabilities, by_chance))
    about = f"recalled: share of the facts; held out: on paraphrases not in training; {PLUS_MINUS}"
    return table("Relations", about, columns, lines)


def _picture(relations: list[str], data: dict) -> HeatMap:
    names = ("recalled", "recalled_held_out")
    means = np.array([[mean_of_known(data[name][data["relation"] == n]) for name in names] for n in range(len(relations))])
    caption = "share of the facts, by the number of the relation in the table"
    return HeatMap("Recall", caption, means, "relation", "prompts", 0.0, 1.0, ("trained", "held out"), ".3f")
