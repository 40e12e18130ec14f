"""Records of facts, to trace, edit and measure: a subject, a prompt that its object completes, prompts that test an edit.

A file is a JSON list of records in one of these forms:

    ours         the fields of Record; a request of an edit may have a relation instead of a prompt
    CounterFact  as published (requested_rewrite, paraphrase_prompts, neighborhood_prompts), or one prompt of each kind in
                 flat form (ground_truth, rephrase_prompt, locality_prompt)
    zsRE         of MEND: src, pred, alt, rephrase, loc, loc_ans
    known_1000   of ROME: prompt, attribute
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from etils import epath

from xfresearch.data.facts import Fact, consequences, facts_of, neighbours, sentence
from xfresearch.errors import UserError


class Record(NamedTuple):
    subject: str
    prompt: str  # '{}' stands for the subject; the target comes next
    target: str = ""  # the object that is true before an edit
    target_new: str = ""  # the object after an edit
    relation: str = ""
    paraphrases: tuple[str, ...] = ()  # other prompts of the fact
    neighbours: tuple[tuple[str, str], ...] = ()  # prompts of other facts, which an edit must keep, and their objects
    consequences: tuple[tuple[str, str, str], ...] = ()  # prompts of facts that follow, their objects after and before
    references: tuple[str, ...] = ()  # texts about other subjects with the object target_new

    @property
    def text(self) -> str:
        """The prompt with the subject."""
        return self.prompt.replace("{}", self.subject)


def records(source: str) -> list[Record]:
    """The records of `source`: those of a corpus of facts, facts or facts:PATH, or of a file FILE.json (read_records).
    Raises UserError for another name."""
    if source.endswith(".json") and not source.startswith("facts:"):
        return read_records(source)
    known = facts_of(source)
    return [record_of(fact, known) for fact in known]


def record_of(fact: Fact, known: Sequence[Fact], new: str = "") -> Record:
    """The fact with its first prompt; its other prompts as paraphrases, those held out first; and its neighbours. With the
    object `new` after an edit: what follows from it, and the sentences of other subjects with this object."""
    prompt = fact.prompts[0].replace(fact.subject, "{}", 1)
    near = tuple((each.prompts[0], each.object) for each in neighbours(known, fact))
    record = Record(fact.subject, prompt, fact.object, new, fact.relation, (*fact.held_out, *fact.prompts[1:]), near)
    if not new:
        return record
    before = {(each.subject, each.relation): each.object for each in known}
    follow = [(each, before[each.subject, each.relation]) for each in consequences(known, fact, new)]
    changed = tuple((each.prompts[0], each.object, old) for each, old in follow if each.object != old)
    same = neighbours(known, fact._replace(object=new))
    return record._replace(consequences=changed, references=tuple(sentence(f.prompts[0], f.object) for f in same))


TEXTS = ("subject", "prompt", "target", "target_new", "relation")


def read_records(path) -> list[Record]:
    """The records of a file. Raises UserError, in one line with the number of the record, for what is not one."""
    try:
        rows = json.loads(epath.Path(path).expanduser().read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: it must be a JSON file of records") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} must be a JSON list of records, at least one")
    return [read_record(f"{path}, record {number}", row) for number, row in enumerate(rows)]


def read_record(where: str, row) -> Record:
    """The record of an object of a file, or of a Record, which is checked as well. Raises UserError, which begins with
    `where`."""
    row = row._asdict() if isinstance(row, Record) else row
    if not isinstance(row, dict):
        raise UserError(f"{where} is {json.dumps(row)[:60]}: it must be a JSON object")
    try:
        fields = _fields(row)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    except (KeyError, TypeError) as error:
        raise UserError(f"{where} has no {error}: its keys are {', '.join(row)}") from None
    for name in TEXTS:
        if not isinstance(fields.get(name, ""), str):
            raise UserError(f"{where}: {name}={json.dumps(fields[name])[:60]} is not allowed: it must be a string")
    if not fields["subject"]:
        raise UserError(f"{where}: subject='' is not allowed: it must be a part of the prompt")
    if not fields["prompt"]:
        return Record(**fields)
    if "{}" not in fields["prompt"]:
        if fields["subject"] not in fields["prompt"]:
            raise UserError(f"{where}: subject {fields['subject']!r} is not in prompt {fields['prompt']!r}")
        fields["prompt"] = fields["prompt"].replace(fields["subject"], "{}", 1)
    return Record(**fields)


def _fields(row: dict) -> dict:
    """The fields of a Record from a row of one of the forms. Raises KeyError for a missing key, ValueError for
    one too many."""
    if "requested_rewrite" in row:
        asked = row["requested_rewrite"]
        fields = {"subject": asked["subject"], "prompt": asked["prompt"], "relation": asked.get("relation_id", "")}
        fields |= {"target": asked["target_true"]["str"], "target_new": asked["target_new"]["str"]}
        near = tuple((prompt, fields["target"]) for prompt in row["neighborhood_prompts"])
        return fields | {"paraphrases": tuple(row["paraphrase_prompts"]), "neighbours": near}
    if "rephrase_prompt" in row:
        near = ((row["locality_prompt"], row["locality_ground_truth"]),)
        fields = {"target": row["ground_truth"], "target_new": row["target_new"], "paraphrases": (row["rephrase_prompt"],)}
        return fields | {"subject": row["subject"], "prompt": row["prompt"], "neighbours": near}
    if "src" in row:
        fields = {"target": row["pred"], "target_new": row["alt"], "paraphrases": (row["rephrase"],)}
        return fields | {"subject": row["subject"], "prompt": row["src"], "neighbours": ((row["loc"], row["loc_ans"]),)}
    if "attribute" in row:
        fields = {"subject": row["subject"], "prompt": row["prompt"], "target": row["attribute"]}
        return fields | {"relation": row.get("relation_id", "")}
    unknown = set(row) - set(Record._fields)
    if unknown:
        raise ValueError(f"key {sorted(unknown)[0]!r} is not allowed: it must be one of {', '.join(Record._fields)}")
    fields = dict(row) | {"subject": row["subject"], "prompt": row.get("prompt", "") if "relation" in row else row["prompt"]}
    for name in ("paraphrases", "references"):
        fields[name] = tuple(row.get(name, ()))
    for name in ("neighbours", "consequences"):
        fields[name] = tuple(tuple(each) for each in row.get(name, ()))
    return fields
