"""Which one-line changes does the base of these studies need? And how much is attention to far tokens worth in it?

Only the learning rate of the base was ever tuned. Every arm here trains on the same batches as the base, with as many FLOPs.
So the batch and the context are no arms: with others, an update reads other text. Windows are no candidates: they say from
which distance on tokens matter, without which arms of attention cannot differ. All changes train at the smaller size first,
because there a run takes an eighth of the time. With :survivors the changes that help there train at both sizes, and those
that are adopted also together, where the windows stand in the same model."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block

# The windows say how much far tokens are worth, and are candidates for nothing.
WINDOWS = {"window_8": block("attention.window=8"), "window_32": block("attention.window=32")}
CHANGES = {
    "embedding_scale": ("model.embedding_scale=learned",),
    "untied": ("model.tie_embeddings=False",),
    "normal_init": ("model.init=normal",),
    "qk_norm": block("attention.qk_norm=rms"),
    "muon": ("optimizer.kind=muon",),
    "long_warmup": ("optimizer.warmup=200",),
    "cosine": ("optimizer.schedule=cosine", "optimizer.final_fraction=0.1"),
    "strong_decay": ("optimizer.weight_decay=0.3",),
    "slow_beta2": ("optimizer.beta2=0.99",),
    "no_clip": ("optimizer.clip=0.0",),
    "z_loss": ("training.z_loss=1e-4",),
    "averaged": ("training.ema=0.99",),
}
SURVIVORS = ("embedding_scale", "long_warmup", "muon")
ADOPTED = ("embedding_scale", "muon")
RATES = (8e-3, 1.6e-2, 3.2e-2)  # of survivors


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "survivors"))
    study.question = "Which one-line changes does the base of the studies need?"
    study.rule = (
        "A change goes on to the larger size if its mean difference is a gain of more than a third of the margin. It is "
        "adopted for all arms of the studies if it is such a gain at both sizes. Windows are not adopted: they say how much "
        "attention beyond 8 and 32 tokens is worth."
    )
    study.baseline, study.solve, study.probes, study.more_sizes = "base", "", (), {}
    study.arms = {"base": ()} | CHANGES | WINDOWS
    if size == "survivors":
        together = sum((CHANGES[name] for name in ADOPTED), ())
        windows = {f"together_{name}": (*together, *window) for name, window in WINDOWS.items()}
        study.arms = {"base": ()} | {name: CHANGES[name] for name in SURVIVORS} | {"together": together} | windows
    if size == "tiny":
        del study.arms.cosine  # the tiny base has this schedule
    else:
        study.sizes = {"micro": common.MICRO} | ({"small": common.SMALL} if size == "survivors" else {})
        study.budgets, study.rates = (4.0,), RATES if size == "survivors" else common.RATES
        study.tune_at, study.rate_runs, study.seeds = (), 1, 3
    return study
