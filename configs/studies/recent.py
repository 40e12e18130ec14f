"""Output gates, attention sinks and differential attention against softmax attention.

Differential attention has as many heads as softmax attention, with queries and keys of half the size, hence as many
parameters. Its FLOPs are not matched: they are 6 to 8 % more, because we mix the values twice, once for each map.

Ye et al. have half as many heads, with queries and keys of the same size. With :differential two heads instead of three at
the small size and of four at the large one. It was added when differential attention was far behind at the small size."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "differential"))
    study.baseline = "softmax"
    differential = block("attention.kind=differential")
    if size == "differential":
        study.question = "Does differential attention improve a small model with fewer heads?"
        study.rule = "It does if two_heads, whose queries and keys are larger, is 'better' over both sizes."
        study.arms = {"softmax": (), "differential": differential}
        study.arms.two_heads = (*differential, *block("attention.heads=2"))
        study.solve_in.differential = study.solve_in.two_heads = ""
        return study
    study.question = "Do output gates, sinks and differential attention improve a small model?"
    study.rule = (
        "A change improves the model if its verdict over both sizes is 'better'. Probes are described, not tested: in the "
        "study w_q, whose runs are as long, no model has an attention sink, recall or induction, so they can show only that "
        "one appears."
    )
    study.arms = {
        "softmax": (),
        "output_gate": block("attention.output_gate=elementwise"),
        "learned_sink": block("attention.sink=learned"),
        "differential": differential,
    }
    study.solve_in.differential = ""
    return study
