"""Feed-forward layers against persistent memory slots in attention."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Can attention over persistent memory replace the feed-forward layer?"
    study.rule = (
        "It can, if an arm without feed-forward layers is equivalent to or better than the baseline at both sizes. QK-norm "
        "matters for it if the two all-attention arms have different verdicts, or intervals that do not overlap."
    )
    study.baseline = "feed_forward"
    few, many = (16, 64) if size == "tiny" else (64, 256)
    study.arms = {
        "feed_forward": (),
        "few_beside": block(f"attention.memory_slots={few}"),  # beside a feed-forward layer, which is smaller for them
        "many_beside": block(f"attention.memory_slots={many}"),
        "all_attention": common.ALL_ATTENTION,
        "all_attention_qk_norm": (*common.ALL_ATTENTION, *block("attention.qk_norm=rms")),
    }
    study.solve_in = {"all_attention": common.SLOTS, "all_attention_qk_norm": common.SLOTS}
    return study
