"""Output gates, attention sinks and differential attention against softmax attention."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Do output gates, sinks and differential attention improve a small model?"
    study.rule = "A change improves the model if its verdict is 'better' at both sizes. Probes are described, not tested."
    study.baseline = "softmax"
    study.arms = {
        "softmax": (),
        "output_gate": block("attention.output_gate=elementwise"),
        "learned_sink": block("attention.sink=learned"),
        "differential": block("attention.kind=differential"),
    }
    return study
