"""Is W_Q redundant? Learned, replaced by the identity, and merged with W_K. With :one_head for models of one head."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "one_head"))
    study.question = "Is W_Q redundant?"
    study.rule = (
        "W_Q is redundant if the arm with the identity in its place, given the saved parameters back in the feed-forward "
        "layer, is equivalent to or better than the learned one at both sizes."
    )
    study.baseline = "learned"
    study.arms = {
        "learned": (),
        "identity": block("attention.query=identity"),
        "merged": block("attention.query=merged"),
        "key_identity": block("attention.key=identity"),
    }
    if size != "tiny":  # at the rank of a head the merged matrix is that of learned queries and keys
        study.arms.merged_at_rank = block("attention.query=merged", "attention.rank=32")
    if size == "one_head":
        study.options = (*study.options, *block("attention.heads=1"))
        study.sizes = {"small": common.SMALL[:2], "large": common.LARGE[:2]}
    return study
