"""Is W_Q what joins an encoder and a decoder? Cross-attention, each stack's attention to itself, or both, with the identity
for W_Q or W_K, with one matrix per head for the two, or with keys that are values (docs/questions/cross_attention.md).

The task is to sort letters, of which there is no end. Positions are at the embedding: nothing stands between W_Q and W_K^T.
With two heads the merged matrices have as many weights as the pair, but a larger cache and more FLOPs. Larger models have
larger batches, so that all sizes make about as many updates."""

from xfresearch.configs.studies import common

CROSS = ("model.blocks.main.cross_attention",)
SELF = ("model.blocks.main.attention", "model.stacks.encoder.blocks.main.attention")


def everywhere(attentions: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Overrides: one option of several attentions."""
    return tuple(f"{attention}.{option}" for attention in attentions)


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Is W_Q what joins an encoder and a decoder?"
    study.rule = (
        "W_Q of cross-attention is redundant if cross_identity_query is 'equivalent' or 'better' over the ladder, and "
        "needed if it is 'worse'. W_Q rather than W_K joins the stacks if it is 'worse' and cross_identity_key is not. It "
        "is needed there more than within a stack if its interval is above that of self_identity_query at every rung. Keys "
        "can be values if cross_value_is_key is 'equivalent' or 'better'."
    )
    study.base = "tasks/sort" if size == "full" else "tasks/sort:tiny"
    study.options = everywhere((*CROSS, *SELF), "heads=2")
    study.match, study.metric, study.margin, study.deviation = "parameters", "loss", 0.03, 0.02
    study.probes, study.more_sizes = ("exact_match",), {}
    study.baseline, study.multiple = "learned", 4
    study.arms = {
        "learned": (),
        "cross_merged": everywhere(CROSS, "query=merged"),
        "cross_identity_query": everywhere(CROSS, "query=identity"),
        "cross_identity_key": everywhere(CROSS, "key=identity"),
        "cross_value_is_key": everywhere(CROSS, "value=key"),
        "self_identity_query": everywhere(SELF, "query=identity"),
        "both_identity_query": everywhere((*CROSS, *SELF), "query=identity"),
    }
    if size == "tiny":
        study.options = (*study.options, "steps=30", "evaluation.final_sequences=16")
        return study
    # With four tokens per parameter the baseline has 0.59 nats per token at w16, and 0.11 at w32 (three runs and two).
    study.options = (*study.options, "data.corpus=('sort:shortest=16,longest=48',)", "optimizer.warmup=30")
    study.options = (*study.options, "evaluation.every=50", "evaluation.sequences=128", "evaluation.final_sequences=512")
    study.sizes = {
        "w16": ("model.width=16", "batch_size=4"),
        "w24": ("model.width=24", "batch_size=8"),
        "w32": ("model.width=32", "batch_size=16"),
    }
    study.budgets, study.tune_at = (2.0, 4.0), ("w16-x2", "w32-x2")
    study.rates, study.rate_runs, study.extensions, study.seeds = (8e-3, 1.6e-2, 3.2e-2), 1, 1, 3
    return study
