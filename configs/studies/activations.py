"""Activations of the feed-forward layer, gated and not: those of Shazeer (2020), and SoLU.

The large size has the learning rates that are best at the small one, with which ReLU and GLU gain nothing by their larger
size. With :tuned the large size tries its own rates: it was added when the other study had ended."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "tuned"))
    study.question = "Which activation is best at equal compute?"
    study.rule = (
        "An activation is better than ReLU if its verdict is 'better' at both sizes. Shazeer's order is found again if the "
        "rank correlation of the means of his eight activations with his is positive at both sizes, with p below 0.05."
    )
    study.baseline = "relu"
    kinds = ("relu", "gelu", "swish", "glu", "bilinear", "reglu", "geglu", "swiglu", "solu")
    study.arms = {kind: block(f"feed_forward.kind={kind}") for kind in kinds}
    if size == "tuned":
        study.question = "Which activation is best at equal compute, with learning rates of its size?"
        study.tune_at = ()
    return study
