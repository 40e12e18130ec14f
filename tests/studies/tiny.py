"""A study of two tiny models, and its command."""

from xfresearch import study

FILE = """
from configs.studies import common


def get_config():
    study = common.base("tiny")
    study.question, study.rule = "Is it faster to do both at once?", "It is, if the verdict is 'better'."
    study.arms = {"parallel": ("model.blocks.main.layout=parallel",), "base": ()}
    study.baseline = "base"
    study.sizes.tiny = ("model.width=16", "model.depth=1", "steps=12")
    return study
"""


def run(config: list[str], workdir, *more: str) -> None:
    study.main([*config, "--workdir", str(workdir), *more])
