"""`capo`: how many bits about people does a model store per parameter? (Allen-Zhu 2025, appendix A; the data bioS of
Allen-Zhu and Li 2024, Physics of language models: part 3.3).

There are N `people`. Each has a name of its own (400 first, 400 middle, 1000 last names), a date of birth (12 months, 28
days, 200 years), a city of birth (200), a university (300), a major (100) and an employer (263), all uniform, and the city
of the employer, which follows from it. A sample is a person: the begin 0, the three parts of the name, then six sentences,
in this order, each of the token of its template and the one or three tokens of its value. Which of `templates` templates a
sentence has is drawn anew for every sample. All values, names and templates have tokens of their own.

The validation split has the same people. Its labels are the names, which are no answers because they cannot be known before,
and the values, which are the answers; difficulty is the number of the sentence. In training every token is a label.

    bits per person      log2(names x values) - (nats that the model spends on a name and its values) / ln 2
    bits per parameter   N x bits per person / parameters of the model, all of them

A person's bits are what the model saves against a code that knows the lists of names and values only. A model that knows
everything still spends ln(N) nats to say which person comes, so the most that it can have is log2(names x values / N)
bits per person.
"""

import math
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from xfresearch.data.tasks.task import Answer, Examples, Sample, Task, next_tokens
from xfresearch.options.fields import option

BEGIN = 0
NAME = (400, 400, 1000)
VALUES = (12, 28, 200, 200, 300, 100, 263)  # month, day, year, city, university, major, employer
SIZES = (*NAME, *VALUES)  # of the fields of a person; the city of the employer is drawn for each employer
CITY, EMPLOYER = 6, 9
SENTENCES = ((3, 4, 5), (CITY,), (7,), (8,), (EMPLOYER,), (10,))  # fields of the value of each sentence; 10: employer's city
# The token of value 0 of each field. Both cities have the same words.
FIRST_TOKENS = (*np.cumsum([1, *SIZES[:-1]]).tolist(), 1 + sum(SIZES[:CITY]))
NAMES, COMBINATIONS = math.prod(NAME), math.prod(VALUES)
LABELS = len(NAME) + sum(map(len, SENTENCES))  # of a held-out person


@dataclass(frozen=True)
class Capo(Task):
    """The options of the corpus, as in `capo:people=50000`."""

    people: int = option(50_000, "number of people", low=1, high=10_000_000)
    templates: int = option(50, "templates of each sentence", low=1)

    @property
    def vocab_size(self) -> int:
        return 1 + sum(SIZES) + len(SENTENCES) * self.templates

    def longest(self, length: int) -> int:
        return 1 + LABELS + len(SENTENCES)

    def sample(self, rng: random.Random, held_out: bool, length: int) -> Sample:
        fields = _people(self.seed, self.people)[rng.randrange(self.people)].tolist()
        words = [first + value for first, value in zip(FIRST_TOKENS, fields, strict=True)]
        tokens, answers = [BEGIN, *words[: len(NAME)]], []
        for number, sentence in enumerate(SENTENCES):
            tokens.append(1 + sum(SIZES) + number * self.templates + rng.randrange(self.templates))
            answers.append(Answer(len(tokens), len(tokens) + len(sentence), number + 1))
            tokens += [words[field] for field in sentence]
        sample = next_tokens(tokens, answers, elsewhere=not held_out)
        of_name = tokens[1 : len(NAME) + 1]
        return sample._replace(targets=[*of_name, *sample.targets[len(NAME) :]])

    def figures(self, measured: dict, parameters: int, examples: Examples) -> dict[str, float]:
        """Bits about each person, and about all people for each parameter."""
        bits = math.log2(NAMES) + math.log2(COMBINATIONS) - LABELS * measured["loss"] / math.log(2)
        return {"bits_per_person": bits, "bits_per_parameter": self.people * bits / parameters}


@lru_cache(maxsize=2)
def _people(seed: int, people: int) -> np.ndarray:
    """The fields of each person [N, 11]: those of SIZES, and the city of the employer."""
    name_N = np.array(random.Random(f"{seed} names").sample(range(NAMES), people))  # no two people have the same
    rng = np.random.default_rng(seed)
    values_NF = rng.integers(0, VALUES, (people, len(VALUES)))
    city_of_employer = rng.integers(0, SIZES[CITY], SIZES[EMPLOYER])
    names_N3 = np.stack(np.unravel_index(name_N, NAME), 1)
    return np.concatenate([names_N3, values_NF, city_of_employer[values_NF[:, -1:]]], 1)
