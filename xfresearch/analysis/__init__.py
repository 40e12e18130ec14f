"""Analyses of trained models: functions of a model and of data, which return a Result.

    from xfresearch import analysis
    result = analysis.attention(lm)
    result.data, result.figures(), result.report("attention.html")

`python -m xfresearch.analyze` runs them from the command line. registry.py has their table.
"""

from xfresearch.analysis.attention import attention
from xfresearch.analysis.contributions import contributions
from xfresearch.analysis.features import features
from xfresearch.analysis.lens import lens
from xfresearch.analysis.memories import memories
from xfresearch.analysis.norms import norms
from xfresearch.analysis.patching import patching
from xfresearch.analysis.recall import recall
from xfresearch.analysis.result import Result
from xfresearch.analysis.routing import routing
from xfresearch.analysis.trace import trace
from xfresearch.analysis.tuned_lens import tuned_lens

__all__ = [
    "Result",
    "attention",
    "contributions",
    "features",
    "lens",
    "memories",
    "norms",
    "patching",
    "recall",
    "routing",
    "trace",
    "tuned_lens",
]
