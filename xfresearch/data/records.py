"""Records of facts, to trace, edit and measure: a subject, a prompt that its object completes, prompts that test an edit.

A file is a JSON list of records, or has one on each line, in our form or one of those that are published: record_forms.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from etils import epath

from xfresearch.data.facts import Fact, consequences, facts_of, neighbours, sentence
from xfresearch.data.given import require_given_corpus
from xfresearch.data.record_forms import Wrong, fields_of
from xfresearch.data.rows import READERS
from xfresearch.data.subjects import subject_in, subject_of
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists
from xfresearch.runtime.formats import JSON, refused, sniff, suffix_of


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
    """The records of `source`: those of a corpus of facts, facts or facts:PATH, or of a JSON file (read_records).
    Raises UserError for another name."""
    if suffix_of(Path(source)) in JSON and not source.startswith("facts:"):
        require_given_corpus(source)
        return read_records(source)
    known = facts_of(source)
    return [record_of(fact, known) for fact in known]


def record_of(fact: Fact, known: Sequence[Fact], new: str = "") -> Record:
    """The fact with its first prompt, its other prompts as paraphrases (the held-out ones first), and its neighbours. With
    `new`, the object after an edit, also the facts that follow from the edit, and sentences of other subjects with `new`."""
    first = fact.prompts[0]
    start = subject_of(first, fact.subject)
    prompt = f"{first[:start]}{{}}{first[start + len(fact.subject) :]}"
    near = tuple((each.prompts[0], each.object) for each in neighbours(known, fact))
    record = Record(fact.subject, prompt, fact.object, new, fact.relation, (*fact.held_out, *fact.prompts[1:]), near)
    if not new:
        return record
    before = {(each.subject, each.relation): each.object for each in known}
    follow = [(each, before[each.subject, each.relation]) for each in consequences(known, fact, new)]
    changed = tuple((each.prompts[0], each.object, old) for each, old in follow if each.object != old)
    same = neighbours(known, fact._replace(object=new))
    return record._replace(consequences=changed, references=tuple(sentence(f.prompts[0], f.object) for f in same))


def read_records(path) -> list[Record]:
    """The records of a file. Raises UserError with the number of the record for anything that is not a record."""
    path = epath.Path(path).expanduser()
    if not exists(path):
        raise UserError(f"{path} does not exist: it must be a JSON file of records")
    file_format = sniff(path)
    if file_format.kind not in ("json array", "json lines", "json objects"):
        raise refused(path, file_format, "it must be a JSON list of records, or JSON lines")
    rows = enumerate(READERS[file_format.kind](path, file_format))
    records = [record for number, (_, row) in rows for record in _records(f"{path}, record {number}", row)]
    if not records:
        raise UserError(f"{path} must be a JSON list of records, at least one")
    return records


def read_record(where: str, row) -> Record:
    """The record of an object of a file, or of a Record, which is checked as well. Raises UserError, which begins with
    `where`."""
    edits = _records(where, row._asdict() if isinstance(row, Record) else row)
    if len(edits) > 1:
        raise UserError(f"{where} has {len(edits)} edits: give each as a record, or the file to read_records")
    return edits[0]


def _records(where: str, row) -> list[Record]:
    try:
        return [Record(**_placed(where, fields)) for fields in fields_of(row)]
    except Wrong as error:
        raise UserError(f"{where}{error}") from None


def _placed(where: str, fields: dict) -> dict:
    """The fields of a record with '{}' for the subject in its prompt. Subjects and objects lose spaces around them: those of
    the prompt count."""
    fields["subject"] = subject = fields["subject"].strip()
    prompt = fields["prompt"]
    if not subject:
        raise UserError(f"{where}: subject='' is not allowed: it must be a part of the prompt")
    if prompt and "{}" not in prompt:
        start = subject_in(prompt, subject)
        if start < 0:
            inside = ", but for a part of a longer word: write {} where it stands" if subject in prompt else ""
            raise UserError(f"{where}: subject {subject!r} is not in prompt {prompt!r}{inside}")
        fields["prompt"] = f"{prompt[:start]}{{}}{prompt[start + len(subject) :]}"
    for name in fields.keys() & {"target", "target_new"}:
        fields[name] = fields[name].strip()
    for name in fields.keys() & {"neighbours", "consequences"}:
        fields[name] = tuple((text, *(each.strip() for each in objects)) for text, *objects in fields[name])
    return fields
