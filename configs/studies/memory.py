"""Feed-forward layers against persistent memory slots in attention. With :beside slots alone against both, with the same
runs."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "beside"))
    study.question = "Can attention over persistent memory replace the feed-forward layer?"
    study.rule = (
        "It can, if an arm without feed-forward layers is equivalent to or better than the baseline at both sizes. It needs "
        "QK-norm for that if of the two all-attention arms only the one with QK-norm is; feed_forward_qk_norm shows what "
        "QK-norm is worth to a model with feed-forward layers."
    )
    study.baseline = "feed_forward"
    few, many = (16, 64) if size == "tiny" else (64, 256)
    study.arms = {
        "feed_forward": (),
        "feed_forward_qk_norm": block("attention.qk_norm=rms"),
        "few_beside": block(f"attention.memory_slots={few}"),  # beside a feed-forward layer, which is smaller for them
        "many_beside": block(f"attention.memory_slots={many}"),
        "all_attention": common.ALL_ATTENTION,
        "all_attention_qk_norm": (*common.ALL_ATTENTION, *block("attention.qk_norm=rms")),
    }
    study.solve_in = {"all_attention": common.SLOTS, "all_attention_qk_norm": common.SLOTS}
    if size == "beside":
        study.question = "Are memory slots alone as good as slots beside a feed-forward layer?"
        study.rule = "They are, if the verdict is 'equivalent' or 'better' at both sizes."
        study.baseline, study.solve_in = "many_beside", {"all_attention": common.SLOTS}
        study.arms = {arm: study.arms[arm] for arm in ("many_beside", "all_attention")}
        as_above = {"small": 128, "large": 256}  # their FLOPs are those of feed_forward, so the runs are the same
        study.cells = {f"{name}/many_beside": block(f"feed_forward.hidden={width}") for name, width in as_above.items()}
    return study
