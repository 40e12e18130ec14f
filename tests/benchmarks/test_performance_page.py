"""docs/performance.md: every row that a GPU is asked stands there, with its figure or with words that say why not."""

import re

from docs import performance
from xfresearch.benchmarks import gpu

OK = {"status": "ok", "seconds": 3.0, "words": "MFU 0.4"}
SESSION = {"commit": "abcdef123456", "date": "d", "versions": {"jax": "1"}, "machine": {"devices": "1 x H100"}}


def test_every_goal_has_an_answer():
    rows = {"update_gpt2": OK, "loop": OK | {"status": "failed"}, "train_moe": OK, "decode": OK | {"status": "not run"}}
    text = performance.goals([SESSION | {"rows": rows}])
    lines = text.splitlines()[2:]
    assert len(lines) == len(performance.GOALS)
    last = [line.split(" | ")[-1].removesuffix(" |") for line in lines]
    answers = dict(zip([row for *_, row in performance.GOALS], last, strict=True))
    assert answers["update_gpt2"] == "MFU 0.4" and answers["loop"] == "failed: MFU 0.4"
    assert answers["decode"] == "not measured: MFU 0.4" and answers["ladder"] == "not measured"
    assert answers["all"] == "2 of 4 rows are ok"


def test_a_row_without_a_figure_says_why_and_how_to_get_it():
    stopped, skipped = OK | {"status": "stopped", "words": "not done"}, OK | {"status": "not run", "words": "no time"}
    first = SESSION | {"rows": {"update_gpt2": stopped, "loop": OK | {"status": "failed"}, "decode": skipped}}
    text = performance.waiting([first, SESSION | {"commit": "fedcba9", "date": "e", "rows": {"decode": OK}}])
    lines = [line.split(" | ") for line in text.splitlines()[5:]]
    figures = dict(zip([row for *_, row in performance.GOALS], [figure for _, figure, _ in lines], strict=True))
    assert figures["update_gpt2"] == "none: not done (abcdef1)" and figures["studies"] == "none: no session came to it"
    assert figures["loop"] == "abcdef1" and figures["decode"] == "fedcba9" and "newest session was on e;" in text
    named = [name for *_, command in lines for name in re.findall(r"--only ([\w,]+)", command)]
    assert {name for each in named for name in each.split(",")} <= set(gpu.ROWS) and len(named) == len(lines) - 2


def test_a_figure_has_its_command_and_machine():
    row = {"config": "configs/a.py", "error": "", "ms": 10.0, "ms_low": 9.0, "ms_high": 11.0, "tokens/s": 1e4, "MFU": 0.5}
    row |= {"memory_bytes": None, "compile_seconds": 2.0, "ratio": 1.0, "ratio_low": 0.9, "ratio_high": 1.1}
    arguments = {"config": ["configs/a.py"], "overrides": ["--config.steps=3"], "rounds": 5, "against": "torch"}
    arguments |= {"operation": "update"}
    file = SESSION | {"machine": {"cores": 2, "cpu": "EPYC"}, "arguments": arguments, "peak_source": "a data sheet"}
    text = performance.updates(file | {"rows": [row, {"config": "torch", "error": "losses differ"}]})
    assert "`python -m xfresearch.bench update --config configs/a.py --config.steps=3 --rounds 5 --against torch`" in text
    assert "2 cores of EPYC, d, commit abcdef123456, jax 1" in text and "| `torch` | losses differ |" in text
    assert "| `configs/a.py` | 10.0 | 9.0 to 11.0 | 10,000 | 0.500 | - | 2.0 | 1.00 (0.90 to 1.10) |" in text


def test_decoding_has_its_command_and_floor():
    row = {"model": "transformers", "ms": 10.0, "ms_low": 9.0, "ms_high": 11.0, "tokens/s": 100.0, "floors": 2.0}
    row |= {"read bytes/s": 5e10, "ratio": 0.5, "ratio_low": 0.4, "ratio_high": 0.6}
    arguments = {"operation": "decode", "config": ["a.py"], "overrides": [], "rounds": 5, "against": "transformers"}
    file = SESSION | {"machine": {"cores": 2, "cpu": "EPYC"}, "arguments": arguments | {"batch": 4}, "rows": [row]}
    text = performance.decoding(file)
    assert "`python -m xfresearch.bench decode --config a.py --batch 4 --rounds 5 --against transformers`" in text
    assert "| `transformers` | 100.0 | 10.00 | 9.00 to 11.00 | 2.00 | 0.50 (0.40 to 0.60) |" in text and "at 50 GB/s" in text


def test_a_sweep_says_what_to_use():
    rows = [{"option": "training.remat", "value": "full", "error": "", "speed": 0.8, "speed_low": 0.7, "speed_high": 0.9}]
    rows[0] |= {"GB": 0.5}
    rows.append({"option": "training.layers", "value": "scan", "error": "no memory"})
    arguments = {"operation": "update", "config": ["a.py"], "overrides": [], "rounds": 5, "against": "", "sweep": True}
    file = SESSION | {"machine": {"cores": 2, "cpu": "EPYC"}, "arguments": arguments, "rows": rows}
    text = performance.sweep(file | {"overrides": {"training.remat": "full"}})
    assert "`python -m xfresearch.bench update --config a.py --rounds 5 --sweep`" in text
    assert "| `training.remat=full` | 0.80 (0.70 to 0.90) | 0.50 |\n| `training.layers=scan` | no memory | - |" in text
    assert "use `--config.training.remat=full`" in text and "Nothing" in performance.sweep(file | {"overrides": {}})
