"""Published orders of architectures on tasks whose data do not end (docs/playground.md): do small models reproduce them?

playground             recall: attention, a window, lambda layers with a small state
playground:mano        values of expressions: rotary positions, no positions
playground:lano        sentences of a grammar: the same
playground:brevo       what a node of a graph depends on, in order: the same
playground:depo        one step on a cycle: the same
playground:capo        bits about people: with feed-forward layers, and without

Each has 10 to 20 runs of 1 to 8 TFLOPs."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block

WINDOW = block("attention.window=8")
LAMBDA = ("model.position=none", *block("attention.kind=lambda", "attention.lambdas.window=0"))


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, *TASKS))
    study.seeds, study.rate_runs, study.extensions = 3, 1, 1
    study.metric, study.margin, study.deviation, study.probes = "accuracy", 0.02, 0.02, ("hardest",)
    study.match, study.solve, study.more_sizes, study.tune_at = "tokens", "", {}, ()
    task = "recall" if size in common.SIZES else size
    study.base, study.sizes = f"playground:{task}_small", {"small": ()}
    study.options = ()
    study.rates = (2e-3, 4e-3)
    TASKS.get(task, _recall)(study)
    if size == "tiny":
        study.base, study.sizes = "playground:tiny", {"tiny": ()}
        study.arms.window = block("attention.window=2")  # of 8 tokens
        study.rates, study.extensions, study.seeds, study.tiny = (1e-2, 3e-2), 0, 2, True
    return study


def _recall(study) -> None:
    study.question = "Does a model with a small state, or with a short window, recall fewer pairs than attention?"
    study.rule = (
        "It does, as in figure 2 of Arora et al. 2023, if the verdict is 'worse'. A window of 8 of the 40 tokens reaches "
        "16 in two layers; a lambda layer with keys of size 4 holds 4 x 32 numbers for all 8 pairs."
    )
    study.baseline = "attention"
    study.arms = {
        "attention": (),
        "window": WINDOW,
        "lambda": (*LAMBDA, *block("attention.lambdas.key_size=4")),
    }


def _positions(study) -> None:
    study.question = "Does a model without positions learn less of the task than one with RoPE?"
    study.rule = (
        "It does if the verdict is 'worse'. If the baseline is at chance, the task does not separate. Causal attention can "
        "tell positions apart without being given them, but in Allen-Zhu 2025 it is behind RoPE on all tasks unless each "
        "layer has a short convolution."
    )
    study.baseline, study.arms = "rope", {"rope": (), "no_position": block("attention.position=none")}


def _mano(study) -> None:
    # With AdamW and 3,000 updates the share of errors was 0.03 higher without positions, with a deviation of pairs of 0.05.
    _positions(study)
    study.options, study.rates = ("steps=2000", *common.RECIPE), (4e-3, 8e-3, 1.6e-2)  # chance is 0.2


def _lano(study) -> None:
    _positions(study)
    study.options, study.rates = common.RECIPE, (8e-3, 1.6e-2, 3.2e-2)
    study.metric, study.margin, study.deviation, study.probes = "loss", 0.02, 0.01, ("divergence", "accepted")


def _brevo(study) -> None:
    # Of the sequences with 6 nodes of playground:brevo_small a tenth is right after as many updates. With 5 nodes a model
    # without positions has fewer whole orders right than frequencies alone, so the loss of their nodes decides. Three pairs
    # decided nothing: those with RoPE had 0.25 to 0.51 nats per token.
    _positions(study)
    study.seeds = 8
    study.options = ("data.corpus=('brevo:nodes=5',)", "steps=1500", *common.RECIPE)
    study.metric, study.margin, study.deviation, study.probes = "loss", 0.02, 0.1, ("hardest", "accepted")
    study.rates = (8e-3, 1.6e-2, 3.2e-2)


def _depo(study) -> None:
    # With two hops, 4 layers are at chance after 2,000 updates. With one hop and 1,000 updates, two of three runs with RoPE
    # had found the step and one had not, so that the study decided nothing.
    _positions(study)
    task = "depo:nodes=6,hops=1,queries=6,symbols=12,longest_word=1,separator=True"
    study.options = (f"data.corpus=('{task}',)", "model.depth=2", "steps=2000", *common.RECIPE)
    study.rates, study.probes = (2e-3, 4e-3, 8e-3), ()


def _capo(study) -> None:
    study.question = "Do feed-forward layers store facts that attention alone does not, at 100 exposures?"
    study.rule = (
        "They do if the verdict on attention_only, which has as many parameters, is 'worse' by the loss of names and facts. "
        "Bits per parameter are a linear function of it. Allen-Zhu and Li 2024 find less than two thirds of the "
        "capacity without feed-forward layers at 100 exposures, and no loss at 1,000."
    )
    study.options = ("steps=200", "evaluation.every=20", "optimizer.warmup=40")  # 100 exposures
    study.metric, study.margin, study.probes = "loss", 0.05, ("bits_per_parameter",)
    study.rates = (6e-3, 1.2e-2)  # of 3e-3, 6e-3 and 1.2e-2 the largest is the best for the baseline, one run each
    study.baseline = "feed_forward"
    study.arms = {"feed_forward": (), "attention_only": block("layout=attention_only")}
    study.match, study.solve_in = "parameters", {"attention_only": "model.depth"}


TASKS = {"mano": _mano, "lano": _lano, "brevo": _brevo, "depo": _depo, "capo": _capo}
