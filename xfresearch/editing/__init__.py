"""Edits of the facts that a model has learnt: editing.rome(lm, requests) -> (edited lm, report). See docs/editing.md."""

from xfresearch.data.records import Record, read_records
from xfresearch.editing.finetune import constrained_finetune, finetune
from xfresearch.editing.memit import memit
from xfresearch.editing.requests import drawn, traced
from xfresearch.editing.rome import rome

METHODS = {each.__name__: each for each in (rome, memit, finetune, constrained_finetune)}

__all__ = ["METHODS", "Record", "constrained_finetune", "drawn", "finetune", "memit", "read_records", "rome", "traced"]
