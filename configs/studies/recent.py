"""Output gates, attention sinks and differential attention against softmax attention.

Differential attention has as many heads as softmax attention, with queries and keys of half the size, hence as many
parameters. Its FLOPs are not matched: they are 6 to 8 % more, because we mix the values twice, once for each map."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Do output gates, sinks and differential attention improve a small model?"
    study.rule = (
        "A change improves the model if its verdict over both sizes is 'better'. Probes are described, not tested: in the "
        "study w_q, whose runs are as long, no model has an attention sink, recall or induction, so they can show only that "
        "one appears."
    )
    study.baseline = "softmax"
    study.arms = {
        "softmax": (),
        "output_gate": block("attention.output_gate=elementwise"),
        "learned_sink": block("attention.sink=learned"),
        "differential": block("attention.kind=differential"),
    }
    study.solve_in.differential = ""
    return study
