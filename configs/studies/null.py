"""Does a study find a difference where there is none? Its arms are the base with other random numbers: batches, initial
values and learning rates that are tried again. So every difference that has a verdict beside 'equivalent' is a false one."""

from xfresearch.configs.studies import common


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Does a study find a difference where there is none?"
    study.rule = "It does, if an arm is better or worse at a rung or over the ladder: one study in twenty may do so."
    study.baseline, study.solve, study.probes, study.more_sizes = "base", "", (), {}
    study.arms = {"base": (), "again": ("seed=10000",), "once_more": ("seed=20000",)}
    if size != "tiny":
        common.ladder(study)
        del study.sizes.small
    return study
