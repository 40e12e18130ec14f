"""Many thin layers with one head against few wide ones with many."""

from xfresearch.configs.studies import common
from xfresearch.configs.studies.common import block


def get_config(size: str = "full"):
    study = common.base(size)
    study.question = "Are many thin layers with one head as good as few wide ones with many?"
    study.rule = "They are, if the verdict over the ladder is 'equivalent', and they are better if it is 'better'."
    study.baseline = "wide"
    thin = ("model.depth=16", *block("attention.heads=1"))
    study.arms = {"wide": (), "thin": thin}
    if size == "tiny":
        study.arms.thin = ("model.depth=8", *block("attention.heads=1", "attention.head_size=8", "feed_forward.hidden=32"))
        return study
    common.ladder(study)
    widths = {"nano": 48, "micro": 64, "small": 96}
    wide = ("model.depth=4", *block("attention.heads=4"))
    study.sizes = {name: (f"model.width={width}", *wide) for name, width in widths.items()}
    study.cells = {f"{name}/thin": block(f"attention.head_size={width // 4}") for name, width in widths.items()}
    return study
