"""Runs that differ in the seed alone are one group, and a verdict on a change is over seeds."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tests.tiny_runs import tiny_config
from xfresearch.comparing.runs import ComparedRun
from xfresearch.comparing.seeds import compare, grouped

LOSSES = {"a": [2.0, 2.1, 1.95], "b": [2.5, 2.4, 2.6]}


def run(path: str, name: str = "gpt2", seed: int = 0, step: int = 20, **changes) -> ComparedRun:
    config = replace(tiny_config(name), seed=seed)
    return ComparedRun(path, replace(config, **changes), [{"step": step, "kind": "train"}], "", step)


def summaries(losses: dict[str, float | None], flops: dict[str, float] | None = None) -> dict:
    by_path = {}
    for path, loss in losses.items():
        own = None if loss is None else {"value": loss}
        by_path[path] = {"held_out": own, "tokens": 100, "flops_per_token": (flops or {}).get(path, 10.0)}
    return by_path


def test_runs_that_differ_in_more_than_the_seed_are_other_groups():
    runs = [run("a"), run("b", seed=1), run("c", "moe"), run("d", batch_size=3), run("e", seed=2, step=10), run("f", seed=1)]
    imported = [run("g")._replace(rows=[]), run("h")._replace(rows=[])]
    listed = [[each.path for each in group] for group in grouped([*runs, *imported])]
    assert listed == [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"], ["h"]]  # f has the seed of b


def test_the_interval_of_a_change_is_over_seeds():
    runs = [run(f"{name}{seed}", {"a": "gpt2", "b": "moe"}[name], seed) for name in LOSSES for seed in range(3)]
    losses = {f"{name}{seed}": value for name, values in LOSSES.items() for seed, value in enumerate(values)}
    first, second = compare(runs, summaries(losses, {f"b{seed}": 12.0 for seed in range(3)}), 0.0)
    assert first["runs"] == ["a0", "a1", "a2"] and first["seeds"] == [0, 1, 2] and first["losses"] == LOSSES["a"]
    assert first["mean"] == pytest.approx(np.mean(LOSSES["a"]))
    assert first["half"] == pytest.approx(stats.t.ppf(0.975, 2) * np.std(LOSSES["a"], ddof=1) / np.sqrt(3))
    welch = stats.ttest_ind(LOSSES["b"], LOSSES["a"], equal_var=False)
    assert second["p_holm"] == pytest.approx(welch.pvalue) and second["difference"] == pytest.approx(0.4833, abs=1e-4)
    assert second["interval"] == pytest.approx([*welch.confidence_interval()])
    assert second["verdict"] == "worse on this text, over 3 and 3 seeds; with 1.20 times the FLOPs"
    assert second["flops"] == 1.2


@pytest.mark.parametrize(
    "losses, words",
    [
        ({"a": 2.0, "b": 3.0}, "none: one seed each"),
        ({"a": 2.0, "a1": 2.1, "b": 3.0}, "none: 1 and 2 seeds"),
        ({"a": 2.0, "b": None}, "none: no held-out loss"),
    ],
)
def test_without_two_seeds_of_both_there_is_no_verdict_on_the_change(losses, words):
    runs = [run(path, "gpt2" if path[0] == "a" else "moe", len(path) - 1) for path in losses]
    result = compare(runs, summaries(losses), 0.0)
    assert result[-1]["verdict"] == words and "p" not in result[-1]


def test_a_group_with_a_run_that_diverged_has_no_mean():
    runs = [run("a"), run("b", "moe"), run("b1", "moe", seed=1), run("b2", "moe", seed=2)]
    group = compare(runs, summaries({"a": 2.0, "b": 3.0, "b1": np.nan, "b2": 3.2}), 0.0)[1]
    assert np.isnan([group["mean"], group["half"], group["difference"]]).all()


def test_a_margin_is_over_seeds_too():
    runs = [run(f"{name}{seed}", {"a": "gpt2", "b": "moe"}[name], seed) for name in "ab" for seed in range(3)]
    losses = {each.path: 2.0 + 0.001 * number for number, each in enumerate(runs)}
    assert compare(runs, summaries(losses), 0.1)[1]["verdict"] == "equal within 0.1 on this text, over 3 and 3 seeds"
