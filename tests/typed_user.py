"""What a user of the package types, for `make types`: each value has the type beside it. Nothing runs this."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

import xfresearch as xf
from xfresearch import analysis, editing, studies, surgery
from xfresearch.analysis.result import Result
from xfresearch.runtime.run_rows import Rows
from xfresearch.study import Studied
from xfresearch.surgery.certificate import Certificate


class Patience(xf.Callback):
    def on_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        if step - figures["best_step"] > 100:
            raise xf.StopTraining("no better")


def train() -> None:
    run: xf.Run = xf.train("gpt2:tiny", {"steps": 5}, workdir="runs/a", callbacks=[Patience()])
    report: Path = run.report
    best: tuple[int, float] | None = run.best
    lm: xf.LanguageModel = run.lm
    table: Rows = xf.sweep(run.config, {"optimizer.learning_rate": [1e-3, 1e-2]}, workdir="runs/sweep", seeds=[0, 1])
    text: str = repr(xf.compare([run, "runs/b"], limit=64))
    found: Studied = xf.study(["feed_forward.kind=relu2"], corpus="notes", workdir="studies/relu2")
    print(report, best, lm, table, text, found.table)


def look(path: Path) -> None:
    lm: xf.LanguageModel = xf.load(path)
    logits_BLV: jax.Array = lm("def main(", replace={"embed": lambda x_BLD: 2 * x_BLD})
    loss_BL: jax.Array = lm.loss(np.zeros((1, 8), int))
    values: dict[str, jax.Array] = lm.capture([[1, 2]], "blocks.*.out")
    result: Result = analysis.attention(lm)
    smaller: tuple[xf.LanguageModel, Certificate] = surgery.drop_query(lm, layers=[0])
    parameters: int = xf.costs(lm.config).parameters
    edited: xf.LanguageModel = editing.rome(lm, [])[0]
    print(logits_BLV, loss_BL, values, result, smaller, parameters, edited, studies.default_study())
