"""Evaluation: the figures that are printed, short texts, and several devices."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

from tests.test_evaluate import evaluated
from tests.tiny_runs import ROOT, make_run
from tests.tolerances import TOLERANCE
from xfresearch import evaluate
from xfresearch.runtime.errors import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number} the cat sat on the mat\n")
    corpus = repr((f"text_files:{folder}",))
    return make_run(tmp_path_factory.mktemp("runs") / "a", "moe", data__corpus=corpus, sequence_length=16)


def test_sparklines_rise_with_their_values():
    assert evaluate.sparkline([3.0, 1.0, 2.0]) == "3.0000 █▁▄ 2.0000"
    assert evaluate.sparkline([1.0]) == "1.0000 ▁ 1.0000"
    assert evaluate.sparkline([1.0, math.nan, 2.0, math.inf]) == "1.0000 ▁ █  inf"


def test_documents_without_bytes_have_no_rank():
    names = [name for name in evaluate.COLUMNS if name != "step"]
    documents = [dict.fromkeys(names, 1.0) | {"document": n, "starts": str(n)} for n in range(3)]
    for document, bits, size in zip(documents, (2.0, math.nan, 3.0), (4, 0, 4), strict=True):
        document |= {"bits_per_byte": bits, "bytes": size}
    assert re.findall(r"^ *(\d) ", evaluate.document_table(documents), re.M) == ["2", "0"]


def test_a_text_shorter_than_a_sequence_of_training_is_read_in_shorter_ones(run, tmp_path):
    (tmp_path / "short.txt").write_text("the cat")
    more = ("--data", f"text_files:{tmp_path}/short.txt", "--split", "train")
    with pytest.raises(UserError, match="config.sequence_length=16"):
        evaluated(run, *more, tmp_path=tmp_path)
    assert evaluated(run, *more, "--sequence-length", "4", tmp_path=tmp_path)["tokens"] > 4


@pytest.mark.long
def test_several_devices_of_one_process_measure_the_same(run, tmp_path):
    alone = evaluated(run, tmp_path=tmp_path)
    command = [sys.executable, "-m", "xfresearch.evaluate", "--workdir", str(run), "--json", str(tmp_path / "mesh.json")]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_NUM_CPU_DEVICES": "4"}, check=True)
    written = json.loads((tmp_path / "mesh.json").read_text())
    assert written["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE["float32"]) and written["tokens"] == alone["tokens"]
