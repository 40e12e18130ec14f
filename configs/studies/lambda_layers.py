"""Lambda layers (Bello 2021) against attention at three lengths, at equal parameters.

At equal FLOPs the feed-forward layers of the lambda models would grow with the length, because attention costs more and
more: the trend would be that of the feed-forward layers, too."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Are lambda layers as good as attention, and does it depend on the length?"
    study.rule = (
        "They are at a length where the verdict is 'equivalent' or 'better'. It depends on the length if 0 lies outside of "
        "the trend's interval."
    )
    study.baseline, study.match = "attention", "parameters"
    study.options = tuple(each for each in study.options if each not in common.POSITIONS)  # lambda layers have their own
    lambdas = ("model.position=none", *block("attention.kind=lambda"))
    study.arms = {
        "attention": common.POSITIONS,
        "lambda_window": lambdas,
        "lambda_global": (*lambdas, *block("attention.lambdas.window=0")),
    }
    if size != "tiny":
        study.sizes = {f"length_{length}": _at(length) for length in (64, 128, 512)}
        study.tune_at, study.trend = "length_128", "sequence_length"
    return study


def _at(length: int) -> tuple[str, ...]:
    """A length, with as many tokens for each update and evaluation as the other studies have."""
    tokens = {"batch_size": 16, "evaluation.sequences": 64, "evaluation.final_sequences": 1024}
    return *common.SMALL, f"sequence_length={length}", *(f"{key}={count * 128 // length}" for key, count in tokens.items())
