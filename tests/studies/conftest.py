"""A study of two tiny models."""

import pytest

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


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> list[str]:
    file = tmp_path_factory.mktemp("config") / "faster.py"
    file.write_text(FILE)
    return ["--config", str(file)]
