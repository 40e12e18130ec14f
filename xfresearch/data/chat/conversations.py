"""Which tokens of a conversation are predicted: those of its answers, by the difference of rendered prefixes.

Stock templates do not mark answers. Before each answer, the template gives the text that a model reads when it is asked for
this answer; after it, the text with the answer. The second begins with the first, and the rest is the answer, up to the
token that ends it. If the text before the next answer begins with all that, both answers are in one example. Otherwise the
template writes earlier answers in another way than the last one (Qwen3 leaves out what was thought, gpt-oss ends them with
another token), and each answer is in an example of its own, with what the model reads before it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xfresearch.data.chat.templates import Part
from xfresearch.data.tokenizers import Tokenizer
from xfresearch.runtime.errors import UserError


class Turn(NamedTuple):
    """An answer of a conversation."""

    before: str  # what the model reads when it is asked for the answer
    after: str  # the same and the answer


class Example(NamedTuple):
    """Tokens, of which some are predicted."""

    ids: np.ndarray  # int32 [n]
    predicted: np.ndarray  # bool [n]; not the first

    @property
    def sizes(self) -> tuple[int, ...]:
        """The places of a row that it takes: the last token is only predicted."""
        return (len(self.ids) - 1,)


def parts_of(messages: Sequence[dict]) -> list[Part]:
    """The parts to render: before and after each answer that is not empty."""
    ends = [number for number, each in enumerate(messages) if each["role"] == "assistant" and _has_content(each)]
    return [part for number in ends for part in (Part(number, True), Part(number + 1, False))]


def _has_content(message: dict) -> bool:
    values = [value.strip() if isinstance(value, str) else value for key, value in message.items() if key != "role"]
    return any(values)


def turns_of(texts: Sequence[str]) -> list[Turn]:
    """The answers of a conversation, from the texts of its parts."""
    return [Turn(before, after) for before, after in zip(texts[::2], texts[1::2], strict=True)]


def chains(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """The answers of each example: successive ones, of which each is read as it was written."""
    chain: list[Turn] = []
    for turn in turns:
        if chain and not turn.before.startswith(chain[-1].after):
            yield chain
            chain = []
        chain.append(turn)
    if chain:
        yield chain


def example_of(chain: Sequence[Turn], tokenizer: Tokenizer, name: str, where: str) -> Example:
    """The tokens of a chain, and which of them are predicted: each answer up to the last token that ends a text. A piece of
    text is tokenised by itself, as what a model reads is when it is asked.

    Raises UserError, which names the template `name` and the place `where` of the conversation, if no text ends with a
    token of tokenizer.stops, if the text with an answer does not begin with that before it, or if the tokens of the pieces
    give another text than those of the whole.
    """
    ids: list[int] = []
    predicted: list[bool] = []
    done = ""
    for turn in chain:
        if not turn.after.startswith(turn.before):
            why = "the text with an answer does not begin with the text that asks for it"
            raise UserError(f"{name}: this chat template has no mask of answers: {why} ({where})")
        read = tokenizer.encode_special(turn.before[len(done) :])
        answer = tokenizer.encode_special(turn.after[len(turn.before) :])
        stop = last_stop(answer, tokenizer, turn, name, where)
        ids += read + answer
        predicted += [False] * len(read) + [place <= stop for place in range(len(answer))]
        done = turn.after
    if tokenizer.decode_bytes(ids) != tokenizer.decode_bytes(tokenizer.encode_special(done)):
        why = "the tokenizer reads a part of a text in another way than the whole, as those do that put a space before it"
        raise UserError(f"{name}: answers cannot be cut from their prompts: {why} ({where})")
    length = len(predicted) - predicted[::-1].index(True)  # what follows the last answer is not read
    return Example(np.array(ids[:length], np.int32), np.array(predicted[:length], bool))


def last_stop(answer: Sequence[int], tokenizer: Tokenizer, turn: Turn, name: str, where: str) -> int:
    """The place of the token that ends an answer. Raises UserError if there is none: the model would never stop."""
    stops = [place for place, token in enumerate(answer) if token in tokenizer.stops]
    if not stops:
        end = turn.after[len(turn.before) :][-30:]
        how = "eos_token of tokenizer_config.json or eos_token_id of generation_config.json must name the token that does"
        raise UserError(f"{name}: no token ends an answer, whose text ends with {end!r} ({where}): {how}")
    return stops[-1]
