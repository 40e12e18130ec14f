"""Dense feed-forward layers against top-2 of 8 experts and memory slots, at equal FLOPs or (:parameters) parameters."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "parameters"))
    study.question = "Dense, or top-2 of 8 experts?"
    study.rule = "Experts are better at equal cost (FLOPs, or parameters) if their verdict is 'better' at both sizes."
    study.baseline = "dense"
    study.arms = {"dense": (), "experts": block("feed_forward.kind=moe")}
    if size == "parameters":
        study.match = "parameters"
    else:
        study.arms.slots = ("model.final_norm=none", *block("layout=all_attention", "attention.memory_slots=256"))
        study.solve_in = {"slots": common.SLOTS}
    return study
