"""What the studies share: WikiText-2, two sizes, learning rates, and probes.

Arms that several studies have, such as the base, are one config: with `--reuse` they are trained once.
"""

from xfresearch.runtime.errors import UserError, nearest
from xfresearch.studies.design import default_study

SIZES = ("full", "tiny")
HIDDEN = "model.blocks.main.feed_forward.hidden"
SLOTS = "model.blocks.main.attention.memory_slots"
DECAY = ("optimizer.schedule=linear", "optimizer.final_fraction=0.0")
DATA = ("data.corpus=('wikitext2',)", "data.tokenizer=bpe", "data.bpe_vocab=1024")
TRAINING = ("batch_size=16", "sequence_length=128", "steps=1000", "optimizer.warmup=50", *DECAY)
# The metric is of 131,072 tokens: its sampling error in a difference must be below that of the seeds.
EVALUATION = ("evaluation.every=100", "evaluation.sequences=64", "evaluation.final_sequences=1024")
# The small baseline has 1.817, 1.791 and 1.832 bits per byte at these rates (seed 0, cosine to a tenth). By the parabola
# through them, a rate half a step beside the best one loses 0.008, less than the margin.
RATES = (4e-3, 8e-3, 1.6e-2)
MARGIN = 0.02  # bits per byte, some 1 %: what papers report as gains
DEVIATION = 0.012  # of paired differences at one size: the median in these studies (docs/studies.md)
NANO = ("model.width=48", "model.depth=4", "model.blocks.main.attention.heads=2")
MICRO = ("model.width=64", "model.depth=4", "model.blocks.main.attention.heads=2")
SMALL = ("model.width=96", "model.depth=4", "model.blocks.main.attention.heads=3")
LARGE = ("model.width=128", "model.depth=4", "model.blocks.main.attention.heads=4")
GPU = ("model.width=512", "model.depth=9", "model.blocks.main.attention.heads=16")  # 29 M parameters, for --add-rung
TINY = ("steps=30", "batch_size=8", "sequence_length=64", "optimizer.warmup=3", "evaluation.final_sequences=16")


def block(*overrides: str) -> tuple[str, ...]:
    """Overrides of the options of the model's block."""
    return tuple(f"model.blocks.main.{each}" for each in overrides)


# After two million tokens the small baseline has 1.79 bits per byte with RoPE, 1.81 with T5's biases, 1.89 with ALiBi, and
# 2.07 with learned positions, with which it has hardly begun to attend.
POSITIONS = ("model.position=none", *block("attention.position=rope"))
# Norms stand where the baseline has them. The published layers are post-norm, which is another question.
ALL_ATTENTION = block("layout=attention_only", "attention.memory_slots=256")


# What helped at two sizes of twelve one-line changes (docs/questions/base_recipe.md). Studies from before have not got it.
RECIPE = ("model.embedding_scale=learned", "optimizer.kind=muon")
LADDER_RATES = (1.6e-2, 3.2e-2, 6.4e-2)  # with the recipe, 0.26 M parameters have 1.949, 1.912 and 1.939 at these


def base(size: str, sizes: tuple[str, ...] = SIZES):
    """A study at the size of docs/questions, or a tiny one that runs end to end in a minute or two and shows nothing."""
    if size not in sizes:
        raise UserError(f"there is no size {size!r}{nearest(size, sizes)} (allowed: {', '.join(sizes)})")
    study = default_study()
    study.base = "variants:tiny"
    study.options, study.probes = (*POSITIONS, *DATA, *TRAINING, *EVALUATION), ("copying", "recall", "induction", "sink")
    study.sizes, study.tune_at, study.rate_runs = {"small": SMALL, "large": LARGE}, ("small",), 1
    study.more_sizes = {"30m": GPU}
    study.rates, study.extensions, study.margin, study.deviation = RATES, 3, MARGIN, DEVIATION
    study.solve = HIDDEN
    if size == "tiny":
        study.options = (*POSITIONS, *TINY)
        study.sizes, study.tune_at = {"tiny": ("model.width=32", "model.depth=2")}, ()
        study.more_sizes = {}
        study.rates, study.extensions, study.seeds, study.tiny = (1e-2, 3e-2), 0, 2, True
    return study


def ladder(study) -> None:
    """Makes `study` a ladder of three sizes, each with two numbers of tokens, of models with the recipe. Rates are tuned at
    the three cheapest rungs, which say how they move with the size and with the tokens."""
    study.options = (*study.options, *RECIPE)
    study.sizes, study.budgets = {"nano": NANO, "micro": MICRO, "small": SMALL}, (4.0, 12.0)
    study.tune_at, study.rate_runs, study.rates = ("nano-x4", "nano-x12", "micro-x4"), 3, LADDER_RATES
    study.seeds, study.deviation = 4, 0.008


def tuned_at_small(study, arms: tuple[str, ...]) -> None:
    """Makes a ladder one rung, small-x4, with some of its arms and with rates that are tuned there. The ladder carries those
    of smaller models to it. It is the largest that two cores can tune in an hour."""
    study.arms, study.solve_in = {name: study.arms[name] for name in arms}, {}
    study.sizes, study.budgets, study.tune_at, study.more_sizes = {"small": SMALL}, (4.0,), (), {}
    study.rates = tuple(rate / 2 for rate in LADDER_RATES)
