"""Tasks at which small models differ, with data that do not end: docs/playground.md.

playground               depo, with the sizes, batch and schedule of the paper, as the next seven
playground:depo2         depo whose words have several tokens, up to 16 hops
playground:brevo         all that a query depends on, in order
playground:brevo2        brevo whose words have several tokens
playground:mano          arithmetic modulo 23
playground:lano          sentences of a grammar
playground:capo          facts about people, each 100 times
playground:recall        the value that followed a key
playground:depo_small    depo for minutes on two cores, with two to four layers, as the next five
playground:brevo_small   brevo for minutes
playground:mano_small    mano for minutes
playground:lano_small    lano for minutes
playground:capo_small    capo for minutes
playground:recall_small  recall for minutes
playground:tiny          recall of a few pairs, runs in less than a minute on two cores

The model is Llama's block with 12 layers of width 768, or 2 to 4 of width 64: it is what a study changes.
"""

from typing import NamedTuple

from xfresearch.configs import common
from xfresearch.runtime.errors import UserError, nearest


class Run(NamedTuple):
    corpus: str
    length: int
    batch: int
    steps: int
    rate: float
    decay: float = 0.03
    depth: int = 2  # of the small model


PUBLISHED = {
    "depo": Run("depo", 2048, 128, 87_500, 1e-3),
    "depo2": Run("depo:nodes=75,hops=16,symbols=4,shortest_word=5,longest_word=7", 2048, 128, 100_000, 1e-3),
    "brevo": Run("brevo", 1024, 256, 100_000, 1e-3),
    "brevo2": Run("brevo:nodes=30,symbols=4", 1536, 192, 200_000, 1e-3),
    "mano": Run("mano", 1024, 64, 80_000, 3e-4, 0.1),
    "lano": Run("lano", 768, 96, 100_000, 5e-4, 0.1),
    "capo": Run("capo", 512, 48, 3_663, 1e-3, 0.01),  # 100 exposures
    "recall": Run("recall:keys=4096,values=4096,pairs=64", 512, 64, 100_000, 1e-3, 0.1),
}
SMALL = {
    "depo": Run("depo:nodes=6,hops=2,queries=6,symbols=12,longest_word=1,separator=True", 43, 64, 6000, 2e-3, depth=4),
    "brevo": Run("brevo:nodes=6", 40, 64, 1000, 3e-3),
    "mano": Run("mano:operations=2,modulus=5", 32, 64, 4000, 4e-3, depth=3),
    "lano": Run("lano:depth=3", 64, 32, 500, 3e-3),
    "capo": Run("capo:people=500", 72, 64, 800, 3e-3),  # 400 exposures
    "recall": Run("recall:keys=32,values=32,pairs=8", 40, 64, 1000, 3e-3),
}
TINY = Run("recall:keys=8,values=8,pairs=2", 8, 64, 60, 1e-2)
RUNS = PUBLISHED | {f"{task}_small": run for task, run in SMALL.items()} | {"tiny": TINY}


def get_config(name: str = "depo"):
    if name not in RUNS:
        raise UserError(f"there is no task {name!r}{nearest(name, RUNS)} (allowed: {', '.join(RUNS)})")
    run, config = RUNS[name], common.base("full" if name in PUBLISHED else "tiny")
    model, block, optimizer = config.model, config.model.blocks.main, config.optimizer
    model.final_norm = block.norm = "rms"
    block.attention.position, block.feed_forward.kind = "rope", "swiglu"
    config.data.corpus, config.data.tokenizer = (run.corpus,), "bytes"
    config.sequence_length, config.batch_size, config.steps = run.length, run.batch, run.steps
    optimizer.learning_rate, optimizer.weight_decay, optimizer.beta2 = run.rate, run.decay, 0.98
    if name in PUBLISHED:
        model.width, model.depth, block.attention.heads = 768, 12, 12
        optimizer.epsilon, optimizer.warmup, optimizer.final_fraction = 1e-6, 1000, 0.1
        if name == "lano":
            optimizer.warmup, optimizer.schedule, optimizer.final_fraction = 0, "linear", 0.0
        config.evaluation.sequences = config.evaluation.final_sequences = 512
    else:
        if name != "tiny":
            model.width, model.depth, block.attention.heads = 64, run.depth, 2
        optimizer.warmup, optimizer.schedule, optimizer.final_fraction = min(50, run.steps // 5), "linear", 0.0
        config.checkpoint.every, config.evaluation.every = 1000, max(run.steps // 10, 15)
        config.evaluation.sequences, config.evaluation.final_sequences = 256, 1024
    return config
