"""`translation`: sentences of English words and their translations into an invented language. Each has exactly one.

    today the old dogs did not follow a small boat in my garden
    fosami bazeson don niradu ma tegur dako zonori uir denel sebosbaki ne

    English    [adverb] subject verb object [preposition noun phrase]
    invented   subject [noun phrase postposition] object [adverb] verb [ne]

A noun has one of three classes, which English does not show. Determiner and adjective follow the noun and agree with its
class and its number. The determiner of the object has a case. The verb says its tense, the number of the subject and the
class of the object, which comes before it, and after it in English. So a model has to move words and to make words agree
over a distance.
"""

import random
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

from xfresearch.data.pairs.pair_tasks import PairTask
from xfresearch.options.fields import option

_NOUNS = """dog fosa, cat dirape, bird doman, horse pobu, king subus, queen bebun, doctor mepas, farmer pedus,
painter giduta, soldier bugosu, sailor vinur, teacher keven, river ripol, garden niradu,
house fifor, tower savus, bridge liros, boat dako,
book tisur, song tosi, letter lerar, mirror gifer, stone zoder, lamp pifos"""
_VERBS = """help kolon, visit fafen, follow sebos, paint fikan, call mulus, greet letus, answer sanur, remember momar,
protect sobe, hear gofal, need radas, expect fudis"""
_ADJECTIVES = """old bazes, young mesil, tall rina, small zonor, quiet kafal, brave tines, green bepin, red tubul,
strange satis, proud leles, tired pules, clever vever"""
_PREPOSITIONS = "in tegur, near labir, behind ketul, under nilan"
_ADVERBS = "today denel, often goru, gladly niva, slowly mener"
_DETERMINERS = {("the", "the"): "d", ("a", "some"): "u", ("this", "these"): "t", ("my", "my"): "m"}  # one, several: stem
_PLURALS = {"o": "mi", "a": "ka", "i": "to"}  # by the vowel of a noun's class
_TENSES = {"present": "", "past": "ba", "future": "si"}
_PAST = {"hear": "heard"}


def _words(text: str) -> dict[str, str]:
    return dict(pair.split() for pair in text.replace("\n", " ").split(","))


NOUNS, VERBS, ADJECTIVES = _words(_NOUNS), _words(_VERBS), _words(_ADJECTIVES)
PREPOSITIONS, ADVERBS = _words(_PREPOSITIONS), _words(_ADVERBS)
CLASS = dict(zip(NOUNS, cycle(_PLURALS), strict=False))  # the vowel of each noun's class


class Phrase(NamedTuple):
    """A noun phrase."""

    noun: str
    several: bool
    determiner: tuple[str, str]
    adjective: str  # '' for none

    def english(self) -> list[str]:
        adjective = [self.adjective] if self.adjective else []
        return [self.determiner[self.several], *adjective, self.noun + ("s" if self.several else "")]

    def invented(self, case: str = "") -> list[str]:
        vowel, number = CLASS[self.noun], "n" if self.several else ""
        noun = NOUNS[self.noun] + (_PLURALS[vowel] if self.several else "")
        adjective = [ADJECTIVES[self.adjective] + vowel + number] if self.adjective else []
        return [noun, *adjective, _DETERMINERS[self.determiner] + vowel + number + case]


class Sentence(NamedTuple):
    subject: Phrase
    verb: str
    object: Phrase
    tense: str
    negated: bool
    adverb: str  # '' for none
    place: tuple[str, Phrase] | None  # a preposition and its phrase

    def english(self) -> str:
        place = [self.place[0], *self.place[1].english()] if self.place else []
        adverb = [self.adverb] if self.adverb else []
        return " ".join([*adverb, *self.subject.english(), *self._english_verb(), *self.object.english(), *place])

    def _english_verb(self) -> list[str]:
        verb, several = self.verb, self.subject.several
        if self.tense == "future":
            return ["will", *(["not"] if self.negated else []), verb]
        if self.negated:
            return ["did" if self.tense == "past" else "do" if several else "does", "not", verb]
        if self.tense == "past":
            return [_PAST.get(verb, f"{verb}ed")]
        return [verb if several else f"{verb}s"]

    def invented(self) -> str:
        place = [*self.place[1].invented(), PREPOSITIONS[self.place[0]]] if self.place else []
        adverb = [ADVERBS[self.adverb]] if self.adverb else []
        verb = VERBS[self.verb] + _TENSES[self.tense] + ("k" if self.subject.several else "") + CLASS[self.object.noun]
        words = [*self.subject.invented(), *place, *self.object.invented("r"), *adverb, verb]
        return " ".join([*words, *(["ne"] if self.negated else [])])


@dataclass(frozen=True)
class Translation(PairTask):
    """`translation`: one draw is a sentence, with each of its free parts at the given rates."""

    adjectives: float = option(0.5, "share of the noun phrases with an adjective", low=0.0, high=1.0)
    places: float = option(0.4, "share of the sentences with a preposition and its noun phrase", low=0.0, high=1.0)
    adverbs: float = option(0.4, "share of the sentences with an adverb", low=0.0, high=1.0)
    negations: float = option(0.25, "share of the sentences that are negated", low=0.0, high=1.0)

    def draw(self, rng: random.Random) -> tuple[str, str]:
        sentence = self.sentence(rng)
        return sentence.english(), sentence.invented()

    def sentence(self, rng: random.Random) -> Sentence:
        place = (rng.choice([*PREPOSITIONS]), self._phrase(rng)) if rng.random() < self.places else None
        adverb = rng.choice([*ADVERBS]) if rng.random() < self.adverbs else ""
        subject, thing = self._phrase(rng), self._phrase(rng)
        verb, tense = rng.choice([*VERBS]), rng.choice([*_TENSES])
        return Sentence(subject, verb, thing, tense, rng.random() < self.negations, adverb, place)

    def _phrase(self, rng: random.Random) -> Phrase:
        adjective = rng.choice([*ADJECTIVES]) if rng.random() < self.adjectives else ""
        return Phrase(rng.choice([*NOUNS]), rng.random() < 0.5, rng.choice([*_DETERMINERS]), adjective)
