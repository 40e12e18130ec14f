"""LayerNorm's two jobs, and norms that leave one or both out: on text, and with :majority on the task of Brody et al. With
:small one rung of the ladder, with rates that are tuned there, and with :alpha the values at which dynamic tanh may start.

In the text models the embedding is multiplied by a trained number that starts at sqrt(width), as Zhu et al. do for dynamic
tanh. So the numbers of the stream start with a deviation of 1, and the sublayers read inputs of about the same scale in all
arms. Without it, inputs that no norm scales are a tenth as large."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block

# Their alpha starts at 1 in the Majority task, as Zhu et al. have it for width 1024, their smallest language model.
BOUNDED = ("dyt", "derf")
ALPHA = 0.125  # at which dynamic tanh starts best, by the study norms:alpha
ALPHAS = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
RULE = (
    "A half of LayerNorm matters if the verdict of the norm without it, over {where}, is 'worse', or if it diverges; it is "
    "dispensable if that verdict is 'equivalent' or 'better'."
)


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "small", "alpha", "majority"))
    study.question, study.rule = "What do LayerNorm's projection and scaling each do?", RULE.format(where="the ladder")
    study.baseline = "layer"
    if size == "majority":
        return _majority(study)
    study.arms = {kind: _everywhere(kind) for kind in ("layer", "rms", "project", "none", "dyt")}
    if size == "alpha":
        return _alpha(study)
    study.arms.dyt += block(f"norm_alpha={ALPHA}")
    if size != "tiny":
        common.ladder(study)
    if size == "small":
        _small(study)
    return study


def _small(study):
    study.question = "What do LayerNorm's projection and scaling each do, with rates that are tuned at 0.54 M parameters?"
    study.rule = RULE.format(where="this rung")
    common.tuned_at_small(study, ("layer", "rms", "project", "none"))


def _everywhere(kind: str) -> tuple[str, ...]:
    return f"model.final_norm={kind}", *block(f"norm={kind}")


def _alpha(study):
    study.question = "At which alpha does dynamic tanh start best?"
    study.rule = "At that of the arm with the least mean: the ladder has it."
    common.ladder(study)
    bounded = {alpha: (*_everywhere("dyt"), *block(f"norm_alpha={alpha}")) for alpha in ALPHAS}
    study.arms = {"layer": _everywhere("layer")} | {f"dyt_{alpha:g}".replace(".", "_"): bounded[alpha] for alpha in ALPHAS}
    study.sizes, study.budgets, study.tune_at, study.probes, study.more_sizes = {"micro": common.MICRO}, (4.0,), (), (), {}
    study.rate_runs, study.seeds = 1, 3
    return study


def _majority(study):
    """One layer of width 8 (docs/playground.md). Only the norm before attention differs, as in the paper. Norms that leave
    out both halves were added when the other arms had ended."""
    study.question = "What do LayerNorm's projection and scaling each do in the Majority task?"
    study.rule = RULE.format(where="all sizes")
    study.base, study.options = "brody_majority", ("steps=500", "checkpoint.every=500", "evaluation.every=25")
    study.more_sizes = {}
    study.sizes, study.tune_at, study.match, study.solve = {"published": ()}, (), "tokens", ""
    kinds = ("layer", "scale", "project", "none", *BOUNDED)
    study.arms = {kind: block(f"norms.attention_in.kind={kind}") for kind in kinds}
    # A norm of kind 'none' has no gain and no bias that the base could leave out.
    study.arms.none += block("norms.attention_in.gain=None", "norms.attention_in.bias=None")
    for kind in BOUNDED:
        study.arms[kind] += block("norms.attention_in.alpha=1.0")
    study.rates, study.metric, study.margin = (1e-3, 3e-3, 1e-2), "accuracy", 0.02
    study.probes = ("norms.angle of queries", "norms.share along the ones vector", "norms.hidden keys")
    return study
