"""Is W_Q what joins an encoder and a decoder? Cross-attention, each stack's attention to itself, or both, with the identity
for W_Q or W_K, with one matrix per head for the two, or with keys that are values (docs/questions/cross_attention.md).

The source is the first 16 of 20 tokens of WikiText-2, and the target is the others. With the source of another row the
base loses 0.92 to 1.45 nats per token over the ladder (the probe `source`); the margin is at most an eighteenth of that.
Targets of 16 tokens made it 0.03 to 0.09, and prefixes of random length are no measure, as they tell the length of the
target. Models have the recipe of the ladders (docs/questions/base_recipe.md): over five seeds at w32-x8 it takes 0.26
nats off the base, and paired differences have a deviation of 0.018 nats, where AdamW's have 0.03 to 0.07. With :sort the
task is to sort letters, whose runs differ too much to decide.

Positions are at the embedding: nothing stands between W_Q and W_K^T. With two heads the merged matrices have as many weights
as the pair, but a larger cache and more FLOPs. Larger models have larger batches, so that all sizes make about as many
updates."""

from xfresearch.configs.studies import common

CROSS = ("model.blocks.main.cross_attention",)
SELF = ("model.blocks.main.attention", "model.stacks.encoder.blocks.main.attention")
PLACES = {"cross": CROSS, "self": SELF, "both": (*CROSS, *SELF)}
CHANGES = {
    "merged": "query=merged",
    "identity_query": "query=identity",
    "identity_key": "key=identity",
    "value_is_key": "value=key",
}
# Not in both places at once, but for one change, which says whether two changes add up.
ARMS = (*((place, change) for place in ("cross", "self") for change in CHANGES), ("both", "identity_query"))


def everywhere(attentions: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Overrides: one option of several attentions."""
    return tuple(f"{attention}.{option}" for attention in attentions)


def get_config(size: str = "full"):
    study = common.base(size, sizes=("full", "tiny", "sort"))
    study.question = "Is W_Q what joins an encoder and a decoder?"
    study.rule = (
        "By the interval of an arm's mean over the ladder, a change is free if the interval ends below the margin, and it "
        "costs if the interval begins above 0 and does not end below the margin. W_Q of cross-attention is redundant if "
        "cross_identity_query is free, and needed if it costs. W_Q rather than W_K joins the stacks if it is needed and "
        "cross_identity_key is free. It is needed there more than within a stack if its interval is above that of "
        "self_identity_query. One matrix can take the place of the pair, and keys can be values, in each place where merged "
        "and value_is_key are free. In both places a change costs the sum of the two, if both_identity_query differs from "
        "the sum of its two by less than the margin. For an arm whose difference grows or shrinks along the ladder, the "
        "intervals of both rungs of the largest size have to say the same."
    )
    study.base = "tasks/sort:tiny" if size == "tiny" else "tasks/sort"
    study.baseline, study.match, study.multiple = "learned", "parameters", 4
    study.metric, study.margin, study.deviation = "loss", 0.05, 0.02
    study.arms = {"learned": ()} | {f"{place}_{of}": everywhere(PLACES[place], CHANGES[of]) for place, of in ARMS}
    study.probes, study.more_sizes = ("source",), {}
    heads = everywhere(PLACES["both"], "heads=2")
    if size == "sort":
        return _sort(study, heads)
    if size == "tiny":
        study.options = (*heads, "data.corpus=('python_stdlib',)", "data.objective.kind=prefix", "steps=30")
        study.options = (*study.options, "evaluation.final_sequences=16")
        return study
    study.options = (*heads, *common.DATA, "data.objective.kind=prefix", "data.objective.lengths=fixed")
    study.options = (*study.options, "source_length=17", "sequence_length=5", "optimizer.warmup=50", "evaluation.every=200")
    study.options = (*study.options, "evaluation.sequences=256", "evaluation.final_sequences=8192", *common.RECIPE)
    study.sizes = {
        "w32": ("model.width=32", "batch_size=48"),
        "w40": ("model.width=40", "batch_size=72"),
        "w48": ("model.width=48", "batch_size=96"),
    }
    # The noise of chosen rates is shared by all rungs, so that pairs do not average it out: two runs for each rate.
    study.budgets, study.tune_at, study.rate_runs = (4.0, 8.0), ("w32-x4", "w32-x8", "w40-x4"), 2
    study.rates, study.extensions, study.seeds = (8e-3, 1.6e-2, 3.2e-2), 1, 4
    return study


def _sort(study, heads: tuple[str, ...]):
    """The study of letters, with its own rule. It decides nothing."""
    study.rule = (
        "W_Q of cross-attention is redundant if cross_identity_query is 'equivalent' or 'better' over the ladder, and "
        "needed if it is 'worse'. W_Q rather than W_K joins the stacks if it is 'worse' and cross_identity_key is not. It "
        "is needed there more than within a stack if its interval is above that of self_identity_query at every rung. Keys "
        "can be values if cross_value_is_key is 'equivalent' or 'better'."
    )
    for arm in ("self_merged", "self_identity_key", "self_value_is_key"):
        del study.arms[arm]
    study.probes, study.margin, study.deviation = ("exact_match",), 0.03, 0.02
    # With four tokens per parameter the baseline has 0.59 nats per token at w16, and 0.11 at w32 (three runs and two).
    study.options = (*heads, "data.corpus=('sort:shortest=16,longest=48',)", "optimizer.warmup=30")
    study.options = (*study.options, "evaluation.every=50", "evaluation.sequences=128", "evaluation.final_sequences=512")
    study.sizes = {
        "w16": ("model.width=16", "batch_size=4"),
        "w24": ("model.width=24", "batch_size=8"),
        "w32": ("model.width=32", "batch_size=16"),
    }
    study.budgets, study.tune_at = (2.0, 4.0), ("w16-x2", "w32-x2")
    study.rates, study.rate_runs, study.extensions, study.seeds = (8e-3, 1.6e-2, 3.2e-2), 1, 1, 3
    return study
