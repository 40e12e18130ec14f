"""Activations of the feed-forward layer, gated and not (Shazeer 2020)."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Which activation is best at equal compute?"
    study.rule = "An activation is better than ReLU if its verdict is 'better' at both sizes."
    study.baseline = "relu"
    kinds = ("relu", "gelu", "glu", "geglu", "swiglu", "solu")
    study.arms = {kind: block(f"feed_forward.kind={kind}") for kind in kinds}
    return study
