"""Is W_Q redundant? Replaced by the identity, with RoPE. With :small at one rung of the ladder, with rates that are tuned
there. With :adamw at two rungs with AdamW, as all studies were before the ladder. With :merged also merged with W_K, which
RoPE does not allow: all arms then have T5's positions. With :one_head the same for models of one head.

window_8 says how much attention to far tokens is worth at each rung. There is no arm with a merged matrix of the head's
rank, because it equals the learned pair (tests/models/test_attention_matrices.py)."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block

IDENTITY = block("attention.query=identity")
T5 = block("attention.position=t5")


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "small", "adamw", "merged", "one_head"))
    study.baseline = "learned"
    if size in ("merged", "one_head"):
        return _merged(study, one_head=size == "one_head")
    if size == "adamw":
        return _adamw(study)
    study.question = "Is W_Q redundant?"
    study.rule = (
        "It is, if the arm with the identity in its place, given the saved parameters back in the feed-forward layer, is "
        "equivalent to or better than the learned one over the ladder. The claim that a model with three quarters of "
        "attention's parameters is 0.01 nats per token worse (0.0056 bits per byte here) holds if the interval of "
        "identity_smaller has this value at every rung; that this does not grow, if the intervals of its changes have 0. "
        "Where window_8 is equivalent to learned, the text does not ask for attention to far tokens, and the answer is of "
        "attention to the last eight."
    )
    study.arms = {"learned": (), "identity": IDENTITY, "identity_smaller": IDENTITY, "window_8": block("attention.window=8")}
    study.solve_in.identity_smaller = ""
    if size == "tiny":
        del study.arms.window_8
    else:
        common.ladder(study)
    if size == "small":
        _small(study)
    return study


def _small(study):
    study.question = "Is W_Q redundant, with rates that are tuned at 0.54 M parameters?"
    study.rule = (
        "It is there, if the identity is equivalent to or better than the learned one. Attention to far tokens pays there, "
        "if window_8 is worse."
    )
    common.tuned_at_small(study, ("learned", "identity", "window_8"))


def _adamw(study):
    study.question = "Is W_Q redundant in models that AdamW trains?"
    study.rule = (
        "The optimiser decides the answer, if the interval of the identity here and that of the study w_q do not meet at a "
        "rung. If they meet, the rates may be why the answer of the study before the ladder was another one."
    )
    study.arms = {"learned": (), "identity": IDENTITY}
    study.sizes, study.budgets, study.more_sizes = {"micro": common.MICRO, "small": common.SMALL}, (4.0,), {}
    study.tune_at, study.rate_runs, study.seeds, study.probes = ("micro-x4",), 3, 4, ()
    return study


def _merged(study, one_head: bool):
    study.question = "Can one matrix for each head take the place of W_Q and W_K?"
    study.rule = (
        "It can, if the merged arm is equivalent to or better than the learned one over both sizes, at equal FLOPs. A "
        "better function is in it if merged_larger, whose FLOPs are not matched, is better. W_Q is redundant with positions "
        "outside of the product if the identity is equivalent or better."
    )
    study.options = (*study.options, *T5)
    study.arms = {"learned": (), "identity": IDENTITY, "merged": block("attention.query=merged")}
    if one_head:  # its size is the width, so a merged matrix has half of the pair's weights
        study.options = (*study.options, *block("attention.heads=1"))
        study.sizes, study.more_sizes = {"small": common.SMALL[:2], "large": common.LARGE[:2]}, {}
    else:  # width x width numbers for each head
        study.arms.merged_larger, study.solve_in.merged_larger = study.arms.merged, ""
    return study
