"""LayerNorm's two jobs, and norms that leave one or both out."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "What do LayerNorm's projection and scaling each do?"
    study.rule = (
        "A half of LayerNorm matters if the norm without it is worse at both sizes; it is dispensable if that norm is "
        "equivalent or better at both."
    )
    study.baseline = "layer"
    kinds = ("layer", "rms", "project", "none", "dyt")
    study.arms = {kind: (f"model.final_norm={kind}", *block(f"norm={kind}")) for kind in kinds}
    return study
