"""python -m xfresearch.evaluate --all-steps: what is kept of each checkpoint, and numbered jobs."""

import json

import numpy as np
import pytest

from tests.tiny_runs import make_run
from xfresearch import evaluate
from xfresearch.evaluation.kept import Kept
from xfresearch.evaluation.losses import Text, Window
from xfresearch.runtime.errors import UserError


def measured_of(run, folder, *flags: str) -> dict:
    evaluate.main(["--workdir", str(run), "--json", str(folder / "out.json"), *flags])
    return json.loads((folder / "out.json").read_text())


def test_numbered_jobs_evaluate_a_checkpoint_each_and_the_curve_is_collected(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "a", "moe")
    evaluate.main(["--workdir", str(run), "--all-steps", "--job", "count"])
    assert capsys.readouterr().out == "2\n"
    with monkeypatch.context() as patch:
        patch.setenv("JOB_COMPLETION_INDEX", "0")
        (alone,) = measured_of(run, tmp_path, "--all-steps", "--job=auto")["steps"]
    assert alone["step"] == 10 and "1 of 2 checkpoints have a result" in capsys.readouterr().err
    measured = []
    monkeypatch.setattr(evaluate, "metrics", recorded(evaluate.metrics, measured))
    curve = measured_of(run, tmp_path, "--all-steps")["steps"]
    assert [point["step"] for point in curve] == [10, 20] and curve[0] == alone and len(measured) == 1
    measured_of(run, tmp_path, "--all-steps", "--job=0", "--limit=2")  # of other data
    assert len(measured) == 2
    for file in (run / "evaluations").glob("*/10.json"):  # of a checkpoint that was replaced
        file.write_text(file.read_text().replace('"checkpoint": "', '"checkpoint": "0'))
    assert measured_of(run, tmp_path, "--all-steps")["steps"][0]["loss"] == curve[0]["loss"] and len(measured) == 3
    for wrong, text in ((["--job=2", "--all-steps"], "at most 1"), (["--job=0"], "not allowed without --all-steps")):
        with pytest.raises(UserError, match=text):
            evaluate.main(["--workdir", str(run), *wrong])


def test_results_of_another_limit_are_other_results(tmp_path):
    """Also if the units of the standard error are the same."""
    tokens = np.zeros(60, np.int32)
    rows = [[Window(first, first + 1, first + 5)] for first in range(0, 50, 5)]
    text = Text("a", "validation", tokens, tokens, {}, rows, 4, 4, "sequences", "0")
    folders = {Kept(tmp_path, text._replace(rows=rows[:limit]), False).folder for limit in (6, 10)}
    assert len(folders) == 2


def recorded(function, calls: list):
    """`function`, which adds to `calls` whenever it is called."""

    def call(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return call
