"""The arguments of analyses: one declaration checks the values of a call, and makes the flags of the command line."""

import math
from argparse import ArgumentTypeError
from typing import NamedTuple

from xfresearch.runtime.errors import UserError


class Argument(NamedTuple):
    """about: its help. number: int or float, None for anything else, which the
    analysis checks. low: the lowest value, which a float must exceed. or_zero: 0 stands for the default. several: a sequence
    of such values."""

    about: str
    number: type[int] | type[float] | None = None
    low: int = 0
    or_zero: bool = False
    several: bool = False

    @property
    def allowed(self) -> str:
        """What a number must be, in words."""
        return f"an integer of at least {self.low}" if self.number is int else f"a finite number above {self.low}"

    def allows(self, value) -> bool:
        """Whether an analysis may have this value."""
        if self.number is None or (self.or_zero and isinstance(value, int) and value == 0):
            return True
        if self.several:
            return value is None or all(self._replace(several=False).allows(each) for each in value)
        if self.number is int:
            return hasattr(value, "__index__") and not isinstance(value, bool) and value.__index__() >= self.low
        return isinstance(value, float | int) and math.isfinite(value) and value > self.low

    def read(self, text: str) -> float:
        """The number of a word of the command line, as argparse's `type` reads it."""
        assert self.number, f"no number: {self.about}"
        value: float | None
        try:
            value = self.number(text)
        except ValueError:
            value = None
        if value is None or not self._replace(several=False, or_zero=False).allows(value):
            raise ArgumentTypeError(f"{text} is not allowed: it must be {self.allowed}")
        return value


ARGUMENTS = {
    "data": Argument("corpus to run on (default: the run's first, held-out part); recall, trace: facts[:PATH]; "
                     "trace: FILE.json"),
    "count": Argument("rows of tokens, or facts (default: that of the analysis)", int, 1),
    "sequence_length": Argument("tokens per row (default: as in training)", int, 2, or_zero=True),
    "corpora": Argument("routing: more corpora, to compare the experts that they use", several=True),
    "window": Argument("trace: layers of a window (default: the share of the paper, 10 of 48)", int, 1,
                       or_zero=True),
    "samples": Argument("trace: draws of the noise for each fact", int, 1),
    "noise": Argument("trace: standard deviations of the noise (default: the paper's 3)", float),
    "source": Argument("model with an encoder: texts that it reads, with --text their targets; patching: the "
                       "clean and the corrupted one", several=True),
    "clean": Argument("patching: the prompt whose values are patched; with --source not needed"),
    "corrupted": Argument("patching: the prompt into which they are, of as many tokens"),
    "answers": Argument("patching: the two answers (default: the tokens that change most)"),
    "receiver": Argument("patching: sublayer that direct paths lead to, such as blocks.3.attention (default: "
                         "final, the head)"),
    "tap": Argument("features: the tap to read (default: the stream after the middle layer)"),
    "target": Argument("features: the tap to predict (default: the one that is read)"),
    "sizes": Argument("features: numbers of features of the dictionaries (default: 2, 4 and 8 times the width of "
                      "the tap)", int, 1, several=True),
    "k": Argument("features: mean number of features of a token", int, 1),
    "steps": Argument("features, tuned_lens: batches of training (default: that of the analysis)", int, 1),
    "top": Argument("memories: triggers of a key (default: the paper's 25)", int, 1),
    "seed": Argument("of what is drawn: rows in a random order, repeated tokens, noise, dictionaries", int, 0),
}  # fmt: skip
WORDS = {"data": "CORPUS[:PATH]", "corpora": "CORPUS[:PATH]", "clean": "TEXT", "corrupted": "TEXT", "answers": "TOKEN"}
WORDS |= {"source": "TEXT", "receiver": "NAME", "tap": "NAME", "target": "NAME", "noise": "X"}  # for a value in the help


def check(given: dict) -> None:
    """Raises UserError for a number in {argument: value} that is not allowed."""
    for name, value in given.items():
        argument = ARGUMENTS.get(name)
        if argument and not argument.allows(value):
            several = "integers" if argument.several else ""
            allowed = f"{several} of at least {argument.low}" if several else argument.allowed
            raise UserError(f"{name}={value!r} is not allowed: it must be {allowed}")


def flag(name: str) -> str:
    """The flag of an argument: the command line has the same names."""
    return f"--{name.replace('_', '-')}"


def add_flags(parser) -> None:
    """Adds the flags of all analyses. A flag that is not given is None."""
    for name, argument in ARGUMENTS.items():
        many = {"nargs": "+"} if argument.several else {"nargs": 2} if name == "answers" else {}
        read = {"type": argument.read} if argument.number else {}
        metavar = WORDS.get(name, "N")
        parser.add_argument(flag(name), metavar=metavar, help=argument.about, **many, **read)
