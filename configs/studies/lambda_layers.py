"""Lambda layers (Bello 2021) against attention at two lengths."""

from configs.studies import common
from configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Are lambda layers as good as attention, and does it depend on the length?"
    study.rule = "They are at a length where the verdict is 'equivalent' or 'better'."
    study.baseline = "attention"
    no_table = "model.position=none"
    study.arms = {
        "attention": (),
        "lambda_window": (no_table, *block("attention.kind=lambda")),
        "lambda_global": (no_table, *block("attention.kind=lambda", "attention.lambdas.window=0")),
    }
    if size != "tiny":
        lengths = {128: 16, 512: 4}
        study.sizes = {
            f"length_{length}": (*common.SMALL, f"sequence_length={length}", f"batch_size={rows}")
            for length, rows in lengths.items()
        }
        study.tune_at = "length_128"
    return study
