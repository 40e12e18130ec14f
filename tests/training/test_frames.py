"""The way from the command `train` to a matrix product is short, and CONTRIBUTING.md names its functions."""

import re
import traceback
from pathlib import Path

import pytest

import xfresearch
from tests.tiny_runs import ROOT
from xfresearch.models import linear
from xfresearch.train import main

MOST = 11
PACKAGE = Path(xfresearch.__file__).parent


class Traced(Exception):
    """A product of a feed-forward layer is traced."""


def test_the_way_to_a_product_is_that_of_the_page(tmp_path, monkeypatch):
    way = []

    def matrix(self):
        frames = [frame for frame in traceback.extract_stack()[:-1] if frame.filename.startswith(str(PACKAGE))]
        way[:] = [f"{Path(frame.filename).relative_to(PACKAGE)}: {frame.name}" for frame in frames]
        if any("feed_forwards" in each for each in way):
            raise Traced
        return self.kernel[...]

    monkeypatch.setattr(linear.Linear, "matrix", matrix)
    with pytest.raises(Traced):
        # A batch of 3: a program of another test is not traced again.
        main(["--config", "brody_majority:tiny", "--config.batch_size=3", "--workdir", f"{tmp_path}/a"])
    named = re.findall(r"`([\w/]+\.py: \w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert way == named and len(way) <= MOST
