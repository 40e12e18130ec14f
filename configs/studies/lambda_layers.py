"""Lambda layers (Bello 2021) against attention at two lengths, at equal parameters. With :recall on associative recall.

At equal FLOPs the feed-forward layers of the lambda models would grow with the length, because attention costs more and
more: the trend would be that of the feed-forward layers, too."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size, sizes=(*common.SIZES, "recall"))
    study.question = "Are lambda layers as good as attention, and does it depend on the length?"
    study.rule = (
        "They are at a length where the verdict is 'equivalent' or 'better'. It depends on the length if 0 lies outside of "
        "the trend's interval."
    )
    study.baseline, study.match = "attention", "parameters"
    study.options = tuple(each for each in study.options if each not in common.POSITIONS)  # lambda layers have their own
    lambdas = ("model.position=none", *block("attention.kind=lambda"))
    if size == "recall":
        return _recall(study, lambdas)
    study.arms = {
        "attention": common.POSITIONS,
        "lambda_window": lambdas,
        "lambda_global": (*lambdas, *block("attention.lambdas.window=0")),
    }
    if size != "tiny":
        study.sizes = {f"length_{length}": _at(length) for length in (128, 512)}
        study.more_sizes = {}
        study.tune_at, study.trend = ("length_128",), "sequence_length"
    return study


def _recall(study, lambdas: tuple[str, ...]):
    """Two layers of width 64. With 8 pairs, attention has 25 % of the values right for 100 to 200 updates, and then all."""
    study.question = "Do lambda layers recall as many pairs as attention?"
    study.rule = (
        "They do where the verdict is 'equivalent' or 'better'. The size of their state is what limits them if lambda_wide, "
        "whose state is four times as large, has a lower mean of errors than lambda at both numbers of pairs."
    )
    study.options = ("data.corpus=('recall:keys=16,values=16',)", "batch_size=64", "steps=2000", *common.DECAY)
    study.options += ("optimizer.warmup=50", "model.width=64", "model.depth=2", *block("attention.heads=2"))
    study.options += ("evaluation.every=100", "evaluation.sequences=256", "evaluation.final_sequences=4096")
    study.arms = {
        "attention": common.POSITIONS,
        "lambda": (*lambdas, *block("attention.lambdas.window=0")),
        "lambda_wide": (*lambdas, *block("attention.lambdas.window=0", "attention.lambdas.key_size=64")),
    }
    study.sizes = {f"pairs_{pairs}": (f"sequence_length={3 * pairs}",) for pairs in (8, 16)}
    study.more_sizes = {}
    study.tune_at, study.trend, study.rates = ("pairs_16",), "sequence_length", (2e-3, 4e-3, 8e-3)
    study.metric, study.probes = "accuracy", ()
    return study


def _at(length: int) -> tuple[str, ...]:
    """A length, with as many tokens for each update and evaluation as the other studies have."""
    tokens = {"batch_size": 16, "evaluation.sequences": 64, "evaluation.final_sequences": 1024}
    return *common.SMALL, f"sequence_length={length}", *(f"{key}={count * 128 // length}" for key, count in tokens.items())
