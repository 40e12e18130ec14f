"""LayerNorm's two jobs, and norms that leave one or both out: on text, and with :majority on the task of Brody et al."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "majority"))
    study.question = "What do LayerNorm's projection and scaling each do?"
    study.rule = (
        "A half of LayerNorm matters if the norm without it is worse at every size; it is dispensable if that norm is "
        "equivalent or better at every size."
    )
    study.baseline = "layer"
    if size == "majority":
        return _majority(study)
    kinds = ("layer", "rms", "project", "none", "dyt", "derf")
    study.arms = {kind: (f"model.final_norm={kind}", *block(f"norm={kind}")) for kind in kinds}
    return study


def _majority(study):
    """One layer of width 8 (docs/majority.md). Only the norm before attention differs, as in the paper."""
    study.question = "What do LayerNorm's projection and scaling each do in the Majority task?"
    study.base, study.options = "configs/brody_majority.py", ("steps=1000", "checkpoint.every=1000", "evaluation.every=50")
    study.sizes, study.tune_at, study.match, study.solve = {"published": ()}, "", "tokens", ""
    study.arms = {kind: block(f"norms.attention_in.kind={kind}") for kind in ("layer", "scale", "project")}
    study.rates, study.metric, study.margin = (1e-3, 3e-3, 1e-2), "accuracy", 0.02
    study.probes = ("norms.angle of queries", "norms.share along the ones vector", "norms.hidden keys")
    return study
