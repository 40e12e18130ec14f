"""Is W_O redundant without the norm after it? The saved parameters are given back to the feed-forward layer, or not (the
arms called smaller).

With :pre_norm the same runs beside pre-norm. With :small one rung of the ladder, with rates that are tuned there, and
with :small_pre_norm these runs beside pre-norm. With :layouts pre-norm against layouts with fewer norms, skips or
matrices between attention and feed-forward layer."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block

IDENTITIES = ("attention.value=identity", "attention.output=identity")


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "pre_norm", "small", "small_pre_norm", "layouts"))
    if size == "layouts":
        return _layouts(study)
    study.question = "Is W_O redundant without the norm after it?"
    study.rule = (
        "It is, if fused_output, which has W_O W_1 as one matrix and the parameters of W_O given back, is equivalent to or "
        "better than no_residual_between over the ladder. It costs nothing to leave it out if fused_output_smaller, which "
        "does not get them back, is, too. pre_norm says what the layout without the norm costs."
    )
    study.baseline = "no_residual_between"
    study.arms = {layout: block(f"layout={layout}") for layout in ("no_residual_between", "fused_output", "pre_norm")}
    study.arms.fused_output_smaller, study.solve_in.fused_output_smaller = study.arms.fused_output, ""
    if size != "tiny":
        common.ladder(study)
    if size.startswith("small"):
        _small(study)
    if size.endswith("pre_norm"):
        _beside_pre_norm(study)
    return study


def _beside_pre_norm(study):
    """It trains nothing with --reuse of the study itself, because its arms have the same updates."""
    study.question = "What do layouts in which W_O can go cost beside pre-norm?"
    study.rule = "Nothing, if fused_output or fused_output_smaller is equivalent to or better than pre_norm over the ladder."
    if len(study.sizes) == 1:
        study.rule = "Nothing at this rung, if fused_output is equivalent to or better than pre_norm."
    study.baseline, study.matched_to = "pre_norm", study.baseline


def _small(study):
    study.question = "Is W_O redundant without the norm after it, with rates that are tuned at 0.54 M parameters?"
    study.rule = "What the ladder has at its smaller rungs holds there if fused_output is better than no_residual_between."
    common.tuned_at_small(study, ("no_residual_between", "fused_output", "pre_norm"))


def _layouts(study):
    study.question = "Which layouts with fewer norms, skips or matrices are as good as pre-norm?"
    study.rule = "Those whose verdict over both sizes is 'equivalent' or 'better'."
    study.baseline = "pre_norm"
    layouts = ("pre_norm", "no_norm_between", "no_residual_between", "fused_output", "parallel")
    study.arms = {layout: block(f"layout={layout}") for layout in layouts}
    study.arms.fused_output_smaller, study.solve_in.fused_output_smaller = study.arms.fused_output, ""
    study.arms.skipless = block("layout=skipless", "attention.shaping=shaped", *IDENTITIES)
    study.arms.skipless_smaller, study.solve_in.skipless_smaller = study.arms.skipless, ""
    return study
