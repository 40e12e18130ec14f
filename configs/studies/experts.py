"""Dense feed-forward layers against top-2 of 8 experts and memory slots, at equal FLOPs. With :parameters dense layers and
experts at equal parameters, with :slots experts and slots."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "parameters", "slots"))
    experts = block("feed_forward.kind=moe", "feed_forward.moe.expert=gelu")  # the activation of the dense layers
    study.question = "Dense, or top-2 of 8 experts?"
    study.rule = "Experts are better at equal cost (FLOPs, or parameters) if their verdict is 'better' at both sizes."
    study.baseline = "dense"
    study.arms = {"dense": (), "experts": experts}
    if size == "parameters":
        study.match = "parameters"
    elif size == "slots":
        study.question = "Memory slots, or top-2 of 8 experts, at equal FLOPs?"
        study.rule = "One is better than the other if the verdict of the experts is 'better', or 'worse', at both sizes."
        study.baseline, study.arms = "slots", {"slots": common.ALL_ATTENTION, "experts": experts}
        as_dense = {"small": 384, "large": 512}  # their FLOPs are those of the dense arm, so the runs are the same
        study.cells = {f"{name}/slots": block(f"attention.memory_slots={count}") for name, count in as_dense.items()}
    else:
        study.arms.slots, study.solve_in = common.ALL_ATTENTION, {"slots": common.SLOTS}
    return study
