"""The published forms of records of facts, and ours: finds the form of a JSON object, and reads its fields.

    ours         the fields of Record; a request of an edit may have a relation instead of a prompt
    CounterFact  of ROME (requested_rewrite, paraphrase_prompts, neighborhood_prompts), or one prompt of each kind, as
                 EasyEdit has it (ground_truth, rephrase_prompt, locality_prompt)
    zsRE         of MEND: src, pred, alt, rephrase, loc, loc_ans
    KnowEdit     of EasyEdit: prompt, target_new, ground_truth, portability, locality; WikiBio: text, labels, concept
    MQuAKE       a list as requested_rewrite: several edits, one record each. The questions follow from all of them, and
                 belong to the last one
    known_1000   of ROME: prompt, attribute
"""

import json
from collections.abc import Callable, Iterator

FIELDS = {  # of Record: what each holds, in words
    "subject": "a string",
    "prompt": "a string",
    "target": "a string",
    "target_new": "a string",
    "relation": "a string",
    "paraphrases": "a list of strings",
    "neighbours": "a list of pairs of strings: a prompt, its object",
    "consequences": "a list of triples of strings: a prompt, its object after and before",
    "references": "a list of strings",
}
_SIZES = {"neighbours": 2, "consequences": 3}


class Wrong(ValueError):
    """What is wrong with a record. Its text names the key, and follows the record's number."""


class Node:
    """A JSON value in a record, with its path, for messages."""

    def __init__(self, value, path: str = ""):
        self.value = value
        self.path = path

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def wrong(self, allowed: str) -> Wrong:
        shown = json.dumps(self.value, ensure_ascii=False)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        what = f": {self.path}={shown} is not allowed" if self.path else f" is {shown}"
        return Wrong(f"{what}: it must be {allowed}")

    def __getitem__(self, key: str) -> "Node":
        if not isinstance(self.value, dict):
            raise self.wrong("a JSON object")
        if key not in self.value:
            raise Wrong(f" has no {self._below(key)!r}: the keys are {', '.join(self.value) or 'none'}")
        return Node(self.value[key], self._below(key))

    def _below(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value

    def texts(self, key: str) -> tuple[str, ...]:
        """The strings of a list; () if there is no such key."""
        return tuple(each.text() for each in self.items(key))

    def items(self, key: str) -> list["Node"]:
        """The elements of a list; [] if there is no such key, or it is null."""
        if key not in self or self[key].value is None:
            return []
        node = self[key]
        if not isinstance(node.value, list):
            raise node.wrong("a list")
        return [Node(value, f"{node.path}[{number}]") for number, value in enumerate(node.value)]

    def answer(self) -> str:
        """A string, or the first of a list of them, which may be nested: the others are its aliases."""
        value = self.value
        while isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, str):
            raise self.wrong("a string, or a list that begins with one")
        return value

    def optional(self, *keys: str) -> str:
        """The string below the keys; '' if one of them is missing or null."""
        node = self
        for key in keys:
            if key not in node or node[key].value is None:
                return ""
            node = node[key]
        return node.text()


def fields_of(value) -> list[dict]:
    """The fields of the records that an object of a file states: one, or several for MQuAKE. Raises Wrong."""
    row = Node(value)
    if not isinstance(value, dict):
        raise row.wrong("a JSON object")
    form = next((form for recognises, form in _FORMS if recognises(row)), _ours)
    return form(row)


def _rewrites(row: Node) -> list[dict]:
    asked = row["requested_rewrite"]
    several = isinstance(asked.value, list)
    rewrites = [_rewrite(each) for each in (row.items("requested_rewrite") if several else [asked])]
    if several and not rewrites:
        raise asked.wrong("at least one edit")
    near = tuple((prompt, rewrites[0]["target"]) for prompt in row.texts("neighborhood_prompts"))
    rewrites[-1] |= {"paraphrases": row.texts("paraphrase_prompts"), "neighbours": near}
    if "new_answer" in row:
        answers = row["new_answer"].text(), row.optional("answer")
        rewrites[-1]["consequences"] = tuple((question, *answers) for question in row.texts("questions"))
    return rewrites


def _rewrite(asked: Node) -> dict:
    fields = {"subject": asked["subject"].text(), "prompt": asked["prompt"].text()}
    fields |= {"target": asked.optional("target_true", "str"), "target_new": asked["target_new"]["str"].text()}
    return fields | {"relation": asked.optional("relation_id")}


def _flat(row: Node) -> list[dict]:
    fields: dict[str, object] = {name: row[name].text() for name in ("subject", "prompt", "target_new")}
    fields |= {"target": row["ground_truth"].answer(), "paraphrases": tuple(filter(None, [row.optional("rephrase_prompt")]))}
    if "locality_prompt" in row:
        fields["neighbours"] = ((row["locality_prompt"].text(), row["locality_ground_truth"].answer()),)
    return [fields]


def _zsre(row: Node) -> list[dict]:
    names = {"subject": "subject", "prompt": "src", "target": "pred", "target_new": "alt"}
    lists = {"paraphrases": (row["rephrase"].text(),), "neighbours": ((row["loc"].text(), row["loc_ans"].text()),)}
    return [{field: row[name].text() for field, name in names.items()} | lists]


def _knowedit(row: Node) -> list[dict]:
    """Questions of portability about an alias of the subject are paraphrases; the others are about facts that follow."""
    names = ("concept", "text", "labels") if "labels" in row else ("subject", "prompt", "target_new")
    fields = {field: row[name].text() for field, name in zip(("subject", "prompt", "target_new"), names, strict=True)}
    fields["prompt"] = fields["prompt"].rstrip()  # WikiBio's ends with a space
    if "ground_truth" in row and row["ground_truth"].value not in (None, []):
        fields["target"] = row["ground_truth"].answer()
    neighbours = tuple((prompt, answer) for _, prompt, answer in _asked(row, "locality"))
    paraphrases = [*filter(None, [row.optional("rephrase_prompt")])]
    consequences = []
    for kind, prompt, answer in _asked(row, "portability"):
        if kind == "Subject_Aliasing" and answer == fields["target_new"]:
            paraphrases.append(prompt)
        else:
            consequences.append((prompt, answer, ""))
    lists = {"neighbours": neighbours, "paraphrases": tuple(paraphrases), "consequences": tuple(consequences)}
    return [fields | lists]


def _asked(row: Node, group: str) -> Iterator[tuple[str, str, str]]:
    """The kind, the prompt and the object of each question of a group. One without an answer cannot be measured."""
    if group not in row or row[group].value is None:
        return
    if not isinstance(row[group].value, dict):
        raise row[group].wrong("a JSON object")
    for kind in row[group].value:
        for asked in row[group].items(kind):
            if asked["ground_truth"].value not in (None, "", [], [[]]):
                yield kind, asked["prompt"].answer(), asked["ground_truth"].answer()


def _known(row: Node) -> list[dict]:
    fields = {"subject": row["subject"].text(), "prompt": row["prompt"].text(), "target": row["attribute"].text()}
    return [fields | {"relation": row.optional("relation_id")}]


def _ours(row: Node) -> list[dict]:
    unknown = sorted(set(row.value) - set(FIELDS))
    if unknown:
        raise Wrong(f": key {unknown[0]!r} is not allowed: it must be one of {', '.join(FIELDS)}")
    fields = {name: row.value[name] for name in row.value}
    fields["subject"] = row["subject"].text()
    fields["prompt"] = row.optional("prompt") if "relation" in row else row["prompt"].text()
    for name, what in FIELDS.items():
        if name in fields:
            fields[name] = _checked(Node(fields[name], name), what)
    return [fields]


def _checked(node: Node, what: str):
    """The value of a field of ours, with tuples for lists."""
    value = node.value
    if what == "a string":
        return node.text()
    size = _SIZES.get(node.path)
    rows = value if isinstance(value, (list, tuple)) else [None]
    if size is None:
        valid = all(isinstance(each, str) for each in rows)
        rows = tuple(rows)
    else:
        valid = all(isinstance(each, (list, tuple)) and list(map(type, each)) == [str] * size for each in rows)
        rows = tuple(map(tuple, rows)) if valid else ()
    if not valid:
        raise node.wrong(what)
    return rows


_FORMS: tuple[tuple[Callable[[Node], bool], Callable[[Node], list[dict]]], ...] = (
    (lambda row: "requested_rewrite" in row, _rewrites),
    (lambda row: "src" in row, _zsre),
    (lambda row: "locality" in row or "portability" in row or "labels" in row, _knowedit),
    (lambda row: "rephrase_prompt" in row or "ground_truth" in row, _flat),
    (lambda row: "attribute" in row, _known),
)
