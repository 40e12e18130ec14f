"""Dense feed-forward layers against top-2 of 8 experts at equal FLOPs. With :parameters at equal parameters, with :slots
memory slots against experts.

The experts have the activation of the dense layers. Our balance loss is one of each sequence. That of Switch, with a weight
of 0.01, is one of thousands of tokens, which holds the router back less; the weight here is a tenth of it."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "parameters", "slots"))
    experts = block("feed_forward.kind=moe", "feed_forward.moe.expert=gelu", "feed_forward.moe.balance_loss=0.001")
    study.question = "Dense, or top-2 of 8 experts?"
    study.rule = "Experts are better at equal cost (FLOPs, or parameters) if their verdict over both sizes is 'better'."
    study.baseline = "dense"
    study.arms = {"dense": (), "experts": experts}
    if size == "parameters":
        study.match = "parameters"
    elif size == "slots":
        study.question = "Memory slots, or top-2 of 8 experts, at equal FLOPs?"
        study.rule = "One is better than the other if the verdict of the experts over both sizes is 'better', or 'worse'."
        study.baseline, study.arms = "slots", {"slots": common.ALL_ATTENTION, "experts": experts}
        as_dense = {"small": 384, "large": 512}  # their FLOPs are those of the dense layers, as in memory.py
        study.cells = {f"{name}/slots": block(f"attention.memory_slots={count}") for name, count in as_dense.items()}
    return study
