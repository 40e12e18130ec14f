"""Facts: triples of subject, relation and object, with sentences that state them. The corpora `facts` and `facts:PATH`.

`facts` is a generated set of invented people, cities and companies, a pure function of a fixed seed. `facts:PATH` reads
relation files in the format of Hernandez et al. 2023 (Linearity of relation decoding in transformer language models), each
an object with `name`, `prompt_templates`, `prompt_templates_zs` and `samples`.

Most sentences of the train split name a second subject, so that only grammar tells which one is meant; and lists give the
objects of a subject in random order, right after it. A model trained on them recalls facts at the subject, as GPT-2 XL does
(Meng et al. 2022). A model trained without them recalled facts at the last token: docs/questions/where_is_a_fact.md.

Of each fact some paraphrases are held out: they are the validation split. Other facts of the relation are stated with the
same templates in the train split, so a model that knows the fact and the relation can complete them.
"""

import json
import random
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from xfresearch.data.cache import digest
from xfresearch.data.corpus_files import check_utf8
from xfresearch.data.given import require_given_corpus
from xfresearch.data.subjects import continued, subject_of
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import inside, names_in, read_bytes

WORDS = tomllib.loads(Path(__file__).with_name("fact_words.toml").read_text("utf-8"))
HEADQUARTERS = WORDS["cities"][::4]  # few, so that each has several companies
FORMAT = 2  # of the train split: another number for other sentences of the same facts
SEED = 0
PASSES = 4  # over the sentences of the train split, each in another order
SENTENCES = (3, 9)  # of a document
SECOND = 0.85  # share of the sentences of the train split that name a second subject
LISTS = 8  # of the objects of each subject, in a pass
PEOPLE = 120
# (a, b, c): c(subject) = b(a(subject)). If an edit changes a, c should change too.
CHAINS = (("birth city", "country", "birth country"), ("employer", "headquarters", "work city"))


class Fact(NamedTuple):
    """A fact. The prompts contain the subject and end right before the object, without the space in front of it."""

    subject: str
    relation: str
    object: str
    prompts: tuple[str, ...]  # in the train split
    held_out: tuple[str, ...]  # in the validation split only


def facts(source: str = "") -> list[Fact]:
    """The generated facts, or those of the relation files (*.json) in the folder `source`; `source` may also be one such
    file. Raises UserError if there are none, or if a file is not of this format."""
    return _generated() if not source else _read(source)


def facts_of(corpus: str, key: str = "data") -> list[Fact]:
    """The facts of the corpus `facts` or `facts:PATH`. Raises UserError, which names `key`, for any other corpus."""
    name, _, path = corpus.partition(":")
    if name != "facts":
        raise UserError(f"{key}={corpus!r} is not allowed: it must be a corpus of facts, facts or facts:PATH")
    require_given_corpus(corpus)
    return facts(path)


def neighbours(known: Sequence[Fact], fact: Fact) -> list[Fact]:
    """The facts of other subjects with the same relation and object: an edit of `fact` must not change them."""
    same = (fact.relation, fact.object)
    return [each for each in known if (each.relation, each.object) == same and each.subject != fact.subject]


def consequences(known: Sequence[Fact], fact: Fact, new: str) -> list[Fact]:
    """The facts that follow by CHAINS if the object of `fact` becomes `new`, with their new objects.

    Only facts of `known` are returned. If the relation of `fact` is the first of a chain, they are facts of its subject; if
    it is the second, they are facts of all subjects whose chain leads through `fact`."""
    objects = {(each.relation, each.subject): each.object for each in known}
    prompts = []
    for first, second, third in CHAINS:
        if fact.relation == first and (second, new) in objects:
            changed = [(fact.subject, objects[second, new])]
        elif fact.relation == second:
            changed = [(f.subject, new) for f in known if f.relation == first and f.object == fact.subject]
        else:
            continue
        of_subject = {each.subject: each for each in known if each.relation == third}
        prompts += [of_subject[subject]._replace(object=other) for subject, other in changed if subject in of_subject]
    return prompts


def sentence(prompt: str, object_: str) -> str:
    """The sentence that states a fact."""
    return f"{continued(prompt, object_)}."


class FactSentences:
    """Facts in sentences, one on a line, a handful to a document. The train split has each fact with all its prompts, PASSES
    times in different documents, and LISTS; the validation split has the held-out paraphrases once, unchanged."""

    splits = ("train", "validation")
    one_stream = False

    def __init__(self, source: str):
        self.facts = facts(source)

    def identity(self) -> dict:
        return {"facts": digest(self.facts), "order": [FORMAT, SEED, PASSES, SENTENCES, SECOND, LISTS]}

    def n_bytes(self, split: str) -> int:
        known = [len(prompt) for fact in self.facts for prompt in (fact.prompts if split == "train" else fact.held_out)]
        return sum(known) * (PASSES if split == "train" else 1)

    def documents(self, split: str) -> Iterator[bytes]:
        rng = random.Random(f"{SEED} {split}")
        for _ in range(PASSES if split == "train" else 1):
            sentences = self._train(rng) if split == "train" else self._validation()
            rng.shuffle(sentences)
            start = 0
            while start < len(sentences):
                end = start + rng.randint(*SENTENCES)
                yield "\n".join(sentences[start:end]).encode()
                start = end


    def _validation(self) -> list[str]:
        return [sentence(prompt, fact.object) for fact in self.facts for prompt in fact.held_out]

    def _train(self, rng: random.Random) -> list[str]:
        """The sentences and lists of one pass."""
        subjects, objects = defaultdict(list), defaultdict(list)
        for fact in self.facts:
            subjects[fact.relation].append(fact.subject)
            objects[fact.subject].append(fact.object)
        sentences = []
        for fact in self.facts:
            for prompt in fact.prompts:
                other = rng.choice(subjects[fact.relation])
                named = other != fact.subject and rng.random() < SECOND
                sentences.append(sentence(_with_second(rng, prompt, fact.subject, other) if named else prompt, fact.object))
        for subject, of_subject in objects.items():
            sentences += [f"{subject} {' '.join(rng.sample(of_subject, len(of_subject)))}." for _ in range(LISTS)]
        return sentences


def _with_second(rng: random.Random, prompt: str, subject: str, other: str) -> str:
    """The prompt with a second subject, after its own or in front."""
    frame = rng.choice((*WORDS["after"], *WORDS["before"])).replace("{other}", other)
    if frame.startswith("{}"):
        start = subject_of(prompt, subject)
        return prompt[:start] + frame.replace("{}", subject) + prompt[start + len(subject) :]
    return frame.replace("{}", prompt)


def _generated() -> list[Fact]:
    """The generated set. Objects are dealt like cards, so that each has about equally many subjects, and at least two."""
    rng = random.Random(SEED)
    people = _people(rng)
    objects = {
        "birth city": _dealt(rng, people, WORDS["cities"]),
        "profession": _dealt(rng, people, WORDS["professions"]),
        "instrument": _dealt(rng, people, WORDS["instruments"]),
        "language": _dealt(rng, people, WORDS["languages"]),
        "employer": _dealt(rng, people, WORDS["companies"]),
        "country": _dealt(rng, WORDS["cities"], WORDS["countries"]),
        "river": _dealt(rng, WORDS["cities"], WORDS["rivers"]),
        "headquarters": _dealt(rng, WORDS["companies"], HEADQUARTERS),
        "product": _dealt(rng, WORDS["companies"], WORDS["products"]),
    }
    for first, second, third in CHAINS:
        objects[third] = {subject: objects[second][middle] for subject, middle in objects[first].items()}
    facts = []
    for relation, templates in WORDS["templates"].items():
        for number, (subject, object_) in enumerate(objects[relation].items()):
            # Two neighbours of the list: one has the subject at its start, the other one in the middle.
            held_out = {number % len(templates), (number + 1) % len(templates)}
            facts.append(_fact(subject, relation, object_, templates, held_out))
    return facts


def _people(rng: random.Random) -> list[str]:
    """Names of people. Many people share a first name, a few share a last name: only both together name one person."""
    last = rng.sample(WORDS["last_names"], len(WORDS["last_names"]))
    first = WORDS["first_names"]
    return [f"{first[(n + n // len(last)) % len(first)]} {last[n % len(last)]}" for n in range(PEOPLE)]


def _dealt(rng: random.Random, subjects: Sequence[str], objects: Sequence[str]) -> dict[str, str]:
    dealt = [objects[number % len(objects)] for number in range(len(subjects))]
    rng.shuffle(dealt)
    return dict(zip(subjects, dealt, strict=True))


def _fact(subject: str, relation: str, object_: str, templates, held_out: set[int]) -> Fact:
    texts = [template.replace("{}", subject) for template in templates]
    trained = tuple(text for number, text in enumerate(texts) if number not in held_out)
    return Fact(subject, relation, object_, trained, tuple(texts[number] for number in sorted(held_out)))


def _read(source: str) -> list[Fact]:
    """The facts of relation files. Every template stands alone and in the frames of fact_words.toml.

    The held-out paraphrases of a fact are one template with all frames; of a relation with a single template, one frame."""
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"corpus 'facts:{source}': there is no such folder; it must have relation files (*.json)")
    facts = []
    for file in [inside(path, name) for name in names_in(path, "*.json")] if path.is_dir() else [path]:
        relation, templates, pairs = _relation(file)
        framed = [frame.replace("{}", template) for template in templates for frame in WORDS["frames"]]
        group = len(WORDS["frames"]) if len(templates) > 1 else 1
        for number, (subject, object_) in enumerate(pairs):
            first = number * group % len(framed)
            facts.append(_fact(subject, relation, object_, framed, set(range(first, first + group))))
    if not facts:
        raise UserError(f"corpus 'facts:{source}': it has no fact; it must be a folder of relation files (*.json)")
    return facts


def _relation(file: Path) -> tuple[str, list[str], list[tuple[str, str]]]:
    """Name, templates and (subject, object) pairs of a file. A subject with several objects is left out, because it is not
    known which object a model should say."""
    try:
        content = read_bytes(file)
        check_utf8(content, file)
        stated = json.loads(content)
        templates = [*stated["prompt_templates"], *stated.get("prompt_templates_zs", ())]
        pairs = [(sample["subject"].strip(), sample["object"].strip()) for sample in stated["samples"]]
        name, templates = stated["name"].strip(), list(dict.fromkeys(template.strip() for template in templates))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: invalid JSON: {getattr(error, 'msg', error)}") from None
    except (KeyError, TypeError, AttributeError):
        wanted = "it must have name, prompt_templates and samples, a list of objects with subject and object"
        raise UserError(f"{file}: not a relation file: {wanted}") from None
    wrong = [template for template in templates if template.count("{}") != 1]
    if wrong or not templates:
        given = repr(wrong[0]) if wrong else "an empty list"
        raise UserError(f"{file}: prompt_templates: {given} is not allowed: a template has one {{}}, for the subject")
    objects = defaultdict(set)
    for subject, object_ in pairs:
        objects[subject].add(object_)
    return name, templates, [(subject, *known) for subject, known in objects.items() if subject and len(known) == 1]
