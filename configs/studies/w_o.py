"""Is W_O redundant without the norm after it? Layouts with and without it, the saved parameters given back or not."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Is W_O redundant without the norm after it?"
    study.rule = (
        "W_O is redundant where the arm without it, fused_output, is equivalent to or better than no_residual_between, "
        "which has it and is otherwise equal. A layout is as good as pre_norm if it is equivalent or better at both sizes. "
        "Arms called smaller do not get their saved parameters back in the feed-forward layer."
    )
    study.baseline = "no_residual_between"
    layouts = ("pre_norm", "no_norm_between", "fused_output", "no_residual_between", "parallel", "skipless")
    study.arms = {layout: block(f"layout={layout}") for layout in layouts}
    identities = "attention.value=identity", "attention.output=identity"
    study.arms.skipless = block("layout=skipless", "attention.shaping=shaped", *identities)
    for arm in ("fused_output", "skipless"):  # these save parameters, and the others do not
        study.arms[f"{arm}_smaller"] = study.arms[arm]
        study.solve_in[f"{arm}_smaller"] = ""
    return study
