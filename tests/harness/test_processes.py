"""Two processes that shard a model's parameters give the answers of one process, and resume from saved answers."""

import json

import pytest

from tests.harness import local_data
from tests.tiny_runs import make_run
from tests.training.processes import Processes

pytest.importorskip("lm_eval", reason="lm_eval is not installed: requirements/eval.txt")
pytestmark = pytest.mark.long


def test_two_processes_give_the_answers_of_one(tmp_path):
    data = local_data.write(tmp_path / "data")
    settings = {"mesh__fsdp": 2, "mesh__data": 1}
    runs = [make_run(tmp_path / name, "gpt2", steps=(1,), **settings) for name in ("one", "two")]

    def evaluated(count: int, run, names: str) -> dict:
        arguments = [f"--workdir={run}", f"--tasks={names}", f"--task-data={data}", f"--json={tmp_path}/out.json"]
        with Processes(count, "xfresearch.evaluate", *arguments) as processes:
            results = processes.succeed()
        assert not any(out for _, out, _ in results[1:])  # only process 0 prints
        return json.loads((tmp_path / "out.json").read_text())["tasks"]

    alone, together = evaluated(1, runs[0], "piqa,lambada"), evaluated(2, runs[1], "piqa")
    together |= {"lambada": evaluated(2, runs[1], "piqa,lambada")["lambada"]}
    assert alone["piqa"] == together["piqa"] and alone["lambada"]["questions"] == together["lambada"]["questions"]
    one, other = (tasks["lambada"]["metrics"]["perplexity"]["value"] for tasks in (alone, together))
    assert one == pytest.approx(other, rel=1e-4)
    lines = next((runs[1] / "harness").glob("*/items.jsonl")).read_text().splitlines()
    keys = [json.loads(line)[0] for line in lines]
    assert len(keys) == len(set(keys)) == 8 * 2 + 8  # each answer is computed once, and one process writes it
