"""The list of named plans and the tables written from their results."""

import json

import pytest

from docs import scale
from tests.contracts.variants import ROOT
from xfresearch.config_io import parse
from xfresearch.planning import named, topologies

RESULTS = ROOT / "docs" / "scale.json"


def test_every_config_is_planned_on_three_machines():
    files = {f"configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    files -= {f"configs/{name}.py" for name in ("__init__", "common", "variants")}
    planned = {plan.config for plan in named.every_config()}
    assert planned == files and len(named.every_config()) == 3 * len(files)
    for file in files:
        assert parse(["--config", str(ROOT / file)]).model.dtype == "bfloat16"  # no plan says so itself
    for plan in named.named():
        assert topologies.parse(plan.topology).devices > 0
    assert len({plan.name for plan in named.named()}) == len(named.named())


def test_what_is_there_is_not_compiled_again(tmp_path, monkeypatch):
    file = tmp_path / "scale.json"
    compiled = []
    monkeypatch.setattr(named, "compile_one", lambda plan: compiled.append(plan.name) or {"fits": True})
    named.main(["--json", str(file), "--only", "depth"])
    assert compiled == [plan.name for plan in named.DEPTH]
    named.main(["--json", str(file), "--only", "depth"])
    assert len(compiled) == len(named.DEPTH) and set(json.loads(file.read_text())["rows"]) == set(compiled)


def test_the_tables_hold_every_result():
    rows = json.loads(RESULTS.read_text())["rows"]
    text = scale.tables(rows)
    for row in rows.values():
        assert f"`{row['config'].removeprefix('configs/')}`" in text or row["group"] == "depth"


def result(group: str) -> list[dict]:
    """Compiled results of a group; all of them, or the test is skipped with what is missing."""
    rows = json.loads(RESULTS.read_text())["rows"]
    missing = [plan.name for plan in named.named() if plan.group == group and plan.name not in rows]
    if missing:
        pytest.skip(f"not compiled yet (make plans): {', '.join(missing)}")
    return [row for row in rows.values() if row["group"] == group]


@pytest.mark.long
@pytest.mark.parametrize("group", ["large", "weak scaling", "every config"])
def test_every_named_plan_fits(group):
    assert [row["config"] for row in result(group) if not row.get("fits")] == []


@pytest.mark.long
def test_large_models_reach_the_utilisation_that_is_wanted():
    slow = {
        f"{row['config']} {row['topology']['name']}": row["utilisation"][0] / row["wanted"] for row in result("large")
    }
    assert min(slow.values()) >= 1, slow


@pytest.mark.long
def test_depth_costs_no_compile_time():
    shallow, deep = (row["compile_seconds"] for row in result("depth"))
    assert deep <= 1.3 * shallow
