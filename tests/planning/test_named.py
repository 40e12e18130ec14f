"""The list of named plans, and the tables that docs/scale.py makes from their results."""

import json
import re

import pytest

from docs import scale
from tests.contracts.variants import ROOT
from xfresearch.planning import named, topologies
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.errors import UserError

RESULTS = ROOT / "docs" / "data" / "scale.json"


def test_every_config_is_planned_on_three_machines():
    files = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.py") if "def get_config" in path.read_text()}
    files -= {f"configs/{name}.py" for name in named.NOT_PLANNED}
    planned = {plan.config for plan in named.every_config()}
    assert planned == files and len(named.every_config()) == 3 * len(files)
    for file in files:
        assert parse(["--config", str(ROOT / file)]).model.dtype == "bfloat16"  # the plans do not override it
    for plan in named.named():
        assert topologies.parse(plan.topology).devices > 0
    assert len({plan.name for plan in named.named()}) == len(named.named())


def test_plans_in_the_file_are_not_compiled_again(tmp_path, monkeypatch):
    file = tmp_path / "scale.json"
    compiled = []
    monkeypatch.setattr(named, "compile_one", lambda plan: compiled.append(plan.name) or {"fits": True})
    named.main(["--json", str(file), "--only", "depth"])
    assert compiled == [plan.name for plan in named.DEPTH]
    named.main(["--json", str(file), "--only", "depth"])
    assert len(compiled) == len(named.DEPTH) and set(json.loads(file.read_text())["rows"]) == set(compiled)


def test_a_word_that_no_plan_has_is_an_error(tmp_path):
    with pytest.raises(UserError, match="^--only=nothing is not allowed: .*depth.*every config"):
        named.main(["--json", str(tmp_path / "scale.json"), "--only", "nothing"])


def test_the_last_candidate_needs_the_least_memory():
    def plan(batch: int, speed: float, memory: float) -> dict:
        sizes = {"batch": {"sequences": batch}, "mesh": {"fsdp": 4}, "remat": "none"}
        return sizes | {"utilisation": [speed, 1.0], "memory": {"total": memory, "available": 10.0}}

    plans = [plan(1, 0.1, 4), plan(2, 0.5, 9), plan(3, 0.4, 10), plan(4, 0.9, 99), plan(5, 0.3, 8), plan(6, 0.2, 7)]
    batches = [options[1] for options in named.ranked(plans)]
    assert batches == [f"--config.batch_size={n}" for n in (2, 3, 5, 1)]
    assert named.ranked([plan(1, 0.9, 99), plan(2, 0.5, 50)]) == [
        named.overrides(2, "fsdp=4", "--config.training.remat=none")
    ]


def test_the_tables_contain_every_result():
    rows = json.loads(RESULTS.read_text())["rows"]
    text = scale.tables(rows) + scale.plans([row for row in rows.values() if row["group"] == scale.EVERY])
    assert " 100 %" not in text and not re.search(r"\d+ to 1\d\d \|", text) and "57 to below the peak" in text
    for row in rows.values():
        assert f"`{row['config'].removeprefix('configs/')}`" in text or row["group"] == "depth"


def result(group: str) -> list[dict]:
    """All compiled plans of a group. Skips the test if one is missing."""
    rows = json.loads(RESULTS.read_text())["rows"]
    missing = [plan.name for plan in named.named() if plan.group == group and plan.name not in rows]
    if missing:
        pytest.skip(f"not compiled yet (make plans): {', '.join(missing)}")
    return [row for row in rows.values() if row["group"] == group]


@pytest.mark.long
def test_all_named_plans_but_one_fit():
    """47 B parameters, with two moments and gradients, leave less than 4 of 16 GiB on each of 64 v5e chips."""
    rows = [row for group in ("large", "weak scaling", "every config") for row in result(group)]
    assert [f"{row['config']} {row['topology']['name']}" for row in rows if not row["fits"]] == [
        "configs/mixtral_8x7b.py v5e:8x8"
    ]


@pytest.mark.long
def test_large_models_reach_the_required_utilisation():
    slow = {
        f"{row['config']} {row['topology']['name']}": row["utilisation"][0] / row["wanted"] for row in result("large")
    }
    assert min(slow.values()) >= 1, slow


@pytest.mark.long
def test_depth_does_not_increase_compile_time():
    shallow, deep = (row["compile_seconds"] for row in result("depth"))
    assert deep <= 1.3 * shallow
