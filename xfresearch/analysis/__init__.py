"""Analyses of trained models: functions of a model and of data, which return a Result.

    from xfresearch import analysis
    result = analysis.attention(lm)
    result.data, result.figures(), result.report("attention.html")

`python -m xfresearch.analyze` runs them from the command line. registry.py has their table.
"""

from xfresearch.analysis.attention import attention as attention
from xfresearch.analysis.block_influence import block_influence as block_influence
from xfresearch.analysis.contributions import contributions as contributions
from xfresearch.analysis.features import features as features
from xfresearch.analysis.lens import lens as lens
from xfresearch.analysis.memories import memories as memories
from xfresearch.analysis.norms import norms as norms
from xfresearch.analysis.patching import patching as patching
from xfresearch.analysis.recall import recall as recall
from xfresearch.analysis.result import Result as Result
from xfresearch.analysis.routing import routing as routing
from xfresearch.analysis.trace import trace as trace
from xfresearch.analysis.tuned_lens import tuned_lens as tuned_lens
