"""The analyses by name, for the command line and the documentation."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from xfresearch.analysis.attention import applies as has_attention
from xfresearch.analysis.attention import attention
from xfresearch.analysis.features import applies as has_taps
from xfresearch.analysis.features import features
from xfresearch.analysis.lens import applies as predicts_tokens
from xfresearch.analysis.lens import lens
from xfresearch.analysis.memories import applies as has_memory
from xfresearch.analysis.memories import memories
from xfresearch.analysis.norms import applies as has_keys
from xfresearch.analysis.norms import norms
from xfresearch.analysis.patching import applies as can_patch
from xfresearch.analysis.patching import patching
from xfresearch.analysis.recall import applies as continues_text
from xfresearch.analysis.recall import recall
from xfresearch.analysis.routing import applies as has_router
from xfresearch.analysis.routing import routing
from xfresearch.analysis.trace import applies as predicts_objects
from xfresearch.analysis.trace import trace
from xfresearch.analysis.tuned_lens import applies as has_one_stream
from xfresearch.analysis.tuned_lens import tuned_lens
from xfresearch.models.model_config import ModelConfig, second_stack


class Analysis(NamedTuple):
    run: Callable[..., Any]  # (lm, data, count, length, ...) -> Result
    lacks: Callable[[ModelConfig], str]  # what a model of a single stack lacks for it; '' if nothing
    about: str
    prompts: bool = False  # it takes a clean and a corrupted prompt instead of rows of a corpus

    def applies(self, model: ModelConfig) -> str:
        """Why it does not apply to a model; '' if it does."""
        return second_stack(model) or self.lacks(model)

    def takes(self, argument: str) -> bool:
        """Whether the function has an argument of this name."""
        return argument in inspect.signature(self.run).parameters


ANALYSES = {
    "attention": Analysis(attention, has_attention, "where heads look, and what their matrices do"),
    "features": Analysis(features, has_taps, "sparse dictionaries of a tap: what they leave out, and what triggers them"),
    "lens": Analysis(lens, predicts_tokens, "predictions after each layer, and which parts make the final one"),
    "memories": Analysis(memories, has_memory, "triggers and values of every key of feed-forwards, experts and slots"),
    "norms": Analysis(norms, has_keys, "angles to the ones vector, and keys that no query can select"),
    "patching": Analysis(patching, can_patch, "which values carry the difference between two prompts", prompts=True),
    "recall": Analysis(recall, continues_text, "which facts the model knows, in sentences of training and in others"),
    "routing": Analysis(routing, has_router, "load, entropy, co-activation, specialisation and saturation of experts"),
    "trace": Analysis(trace, predicts_objects, "which values a fact is recalled from: causal tracing"),
    "tuned_lens": Analysis(tuned_lens, has_one_stream, "predictions after each layer, through trained translators"),
}
