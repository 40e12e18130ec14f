"""Is W_O redundant without the norm after it?"""

from configs.studies import common


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Is W_O redundant without the norm after it?"
    study.rule = (
        "W_O is redundant where the arm without it is equivalent to, or better than, the arm with it at both sizes. Where "
        "both verdicts are 'undecided', the study does not answer."
    )
    study.baseline = "pre_norm"
    study.arms = {
        "pre_norm": ("model.blocks.main.layout=pre_norm",),
        "no_norm_between": ("model.blocks.main.layout=no_norm_between",),
        "fused_output": ("model.blocks.main.layout=fused_output",),
        "parallel": ("model.blocks.main.layout=parallel",),
    }
    study.solve = "model.blocks.main.feed_forward.hidden"
    return study
