"""What the studies share: WikiText-2, two sizes, learning rates, and probes.

Arms that several studies have, such as the base, are one config: with `--reuse` they are trained once.
"""

from xfresearch.errors import UserError, nearest
from xfresearch.studies.design import default_study

SIZES = ("full", "tiny")
HIDDEN = "model.blocks.main.feed_forward.hidden"
SLOTS = "model.blocks.main.attention.memory_slots"
DATA = ("data.corpus=('wikitext2',)", "data.tokenizer=bpe", "data.bpe_vocab=1024")
TRAINING = ("batch_size=16", "sequence_length=128", "steps=1000", "optimizer.warmup=50")
# The metric is of 131,072 tokens: its sampling error in a difference must be below that of the seeds.
EVALUATION = ("evaluation.every=100", "evaluation.sequences=64", "evaluation.final_sequences=1024")
# The small baseline has 2.223, 2.105, 2.079 and 2.181 bits per byte at rates of 1e-3, 3e-3, 1e-2 and 3e-2 (seed 1000). By
# the parabola through the last three, an arm whose best rate lies between two of these loses 0.006, less than the margin.
RATES = (4e-3, 8e-3, 1.6e-2)
SMALL = ("model.width=96", "model.depth=4", "model.blocks.main.attention.heads=3")
LARGE = ("model.width=128", "model.depth=4", "model.blocks.main.attention.heads=4")
TINY = ("steps=30", "batch_size=8", "sequence_length=64", "optimizer.warmup=3", "evaluation.final_sequences=16")


def block(*overrides: str) -> tuple[str, ...]:
    """Overrides of the options of the model's block."""
    return tuple(f"model.blocks.main.{each}" for each in overrides)


ALL_ATTENTION = ("model.final_norm=none", *block("layout=all_attention", "attention.memory_slots=256"))


def base(size: str, sizes: tuple[str, ...] = SIZES):
    """A study at the size of the documents, or a tiny one that runs end to end in a minute and shows nothing."""
    if size not in sizes:
        raise UserError(f"there is no size {size!r}{nearest(size, sizes)} (allowed: {', '.join(sizes)})")
    study = default_study()
    study.base = "configs/variants.py:tiny"
    study.options, study.probes = (*DATA, *TRAINING, *EVALUATION), ("copying", "recall", "induction", "sink")
    study.sizes, study.tune_at = {"small": SMALL, "large": LARGE}, "small"
    study.rates, study.extensions = RATES, 3
    study.solve = HIDDEN
    if size == "tiny":
        study.options = TINY
        study.sizes, study.tune_at = {"tiny": ("model.width=32", "model.depth=2")}, ""
        study.rates, study.extensions, study.seeds, study.tiny = (1e-2, 3e-2), 0, 2, True
    return study
