"""The texts that an edit reads: the prompt of a request, alone and after prefixes, with the new object.

The model's table of positions limits their length. Padding ends with the table, and a longer text is an error: all tokens
beyond would get the table's last position.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xfresearch.analysis.prompts import Prompt, completed, prompt_of
from xfresearch.analysis.sequences import Sequences
from xfresearch.data.records import Record
from xfresearch.models.model_config import longest_sequence
from xfresearch.runtime.errors import UserError

ESSENCE = "{} is a"  # the prompt of the loss's second term (optimise.py): what the subject is should not change


def with_prefix(record: Record, prefix: str) -> Record:
    """The record with a text before its prompt."""
    return record._replace(prompt=prefix.replace("{}", "") + record.prompt)


def prompts_after(lm, record: Record, prefixes: Sequence[str]) -> list[Prompt]:
    """The record's prompt and new object after each prefix. The object before may be missing."""
    return [prompt_of(lm, with_prefix(record, prefix), record.target_new) for prefix in prefixes]


def essence_of(lm, record: Record) -> Prompt:
    """The essence prompt of the record's subject, without an object."""
    return prompt_of(lm, record._replace(prompt=ESSENCE), record.target_new)._replace(target=())


def fitting(lm, prompts: Sequence[Prompt]) -> tuple[Sequences, np.ndarray]:
    """The rows of prompts with their objects, and bool[N, L]: which tokens are the objects'. Raises UserError for a text
    beyond the model's table of positions."""
    rows, is_object_NL = completed(lm, prompts)
    longest = longest_sequence(lm.config) or None
    return replace(rows, tokens_NL=rows.tokens_NL[:, :longest]), is_object_NL[:, :longest]


def check_fit(lm, requests: Sequence[Record], prefixes: Sequence[str]) -> None:
    """Raises UserError for a request that is too long after one of the prefixes."""
    if not any(stack.longest for stack in lm.config.all_stacks):
        return
    for number, record in enumerate(requests):
        try:
            fitting(lm, [*prompts_after(lm, record, prefixes), essence_of(lm, record)])
        except UserError as error:
            raise UserError(f"request {number}, {record.text!r}, after a prefix that the model wrote: {error}") from None
