"""What the studies share: WikiText-2, two sizes, and learning rates."""

from xfresearch.errors import UserError, nearest
from xfresearch.studies.design import default_study

SIZES = ("full", "tiny")
DATA = ("data.corpus=('wikitext2',)", "data.tokenizer=bpe", "data.bpe_vocab=1024")
TRAINING = ("batch_size=16", "sequence_length=128", "steps=1000", "optimizer.warmup=50")
SMALL = ("model.width=96", "model.depth=4", "model.blocks.main.attention.heads=3")
LARGE = ("model.width=160", "model.depth=6", "model.blocks.main.attention.heads=5")
TINY = ("steps=30", "batch_size=8", "sequence_length=64", "optimizer.warmup=3", "evaluation.final_sequences=16")


def base(size: str):
    """A study at the size of the documents, or a tiny one that runs end to end in a minute and shows nothing."""
    if size not in SIZES:
        raise UserError(f"there is no size {size!r}{nearest(size, SIZES)} (allowed: {', '.join(SIZES)})")
    study = default_study()
    study.base = "configs/variants.py:tiny"
    study.options, study.probes = (*DATA, *TRAINING), ("copying", "recall", "induction")
    study.sizes = {"small": SMALL, "large": LARGE}
    if size == "tiny":
        study.options = TINY
        study.sizes = {"tiny": ("model.width=32", "model.depth=2")}
        study.rates, study.extensions, study.seeds, study.tiny = (1e-2, 3e-2), 0, 2, True
    return study
