"""Measures what docs/questions/where_is_a_fact.md says: python -m docs.facts [--runs DIR]

For each model in DIR (runs/facts, runs/facts_all_attention, runs/facts_experts, trained with configs/facts.py): recall, the
trace, and edits of facts by every method. docs/data/facts.json gets the figures, the seconds, the machine and the commit as
they come. What it has already is not measured again, unless other settings are the best ones since a grid has grown. The
settings of each method are chosen on other facts than those of the figures.
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xfresearch.runtime.command import Parser, run
from xfresearch.runtime.errors import UserError

HERE = Path(__file__).parent
Item = tuple[str, Callable[[], dict]]  # its name in facts.json, and the function that measures it
MODELS = {"dense": "facts", "all-attention": "facts_all_attention", "top-2 of 8 experts": "facts_experts"}
TRACED, EDITS = 1000, 100
SEQUENCE = (100, 10)  # numbers of edits in one model
# Settings to choose from, by S: of 10 requests, each alone; of 30 requests in one model.
ALONE, MANY = 10, 30
GRIDS = {
    "rome": [{"ridge": ridge} for ridge in (1e-2, 1.0, 10.0)] + [{"ridge": 1.0, "largest": c} for c in (1.0, 2.0)],
    "finetune": [{"rate": rate} for rate in (5e-5, 1e-4, 2e-4, 5e-4, 2e-3, 5e-3)],
    "constrained_finetune": [{"rate": 2e-2, "largest": c} for c in (2e-3, 3.5e-3, 5e-3, 7e-3, 1e-2, 2e-2, 4e-2)],
}
GRIDS_OF_MANY = {
    "rome": [{"ridge": ridge} for ridge in (1e-4, 1e-2, 1.0, 10.0)],
    "memit": [{"ridge": 1e-2, "weight": weight} for weight in (0.002, 0.02, 0.2, 2.0)],
    "finetune": [{"rate": rate, "steps": 100} for rate in (2e-4, 5e-4, 1e-3, 2e-3, 5e-3)],
    "constrained_finetune": [{"rate": 2e-2, "largest": c} for c in (5e-3, 1e-2, 2e-2, 5e-2, 1e-1)],
}


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m docs.facts", description=__doc__)
    parser.add_argument("--runs", default="runs", metavar="DIR", help="directory of the runs (default: runs)")
    options = parser.parse_args(arguments)
    kept = HERE / "data" / "facts.json"
    written = json.loads(kept.read_text()) if kept.exists() else {}
    workdirs = {name: Path(options.runs) / folder for name, folder in MODELS.items()}
    there = {name: path for name, path in workdirs.items() if (path / "checkpoints").exists()}
    if not there:
        raise UserError(f"--runs={options.runs} has none of {', '.join(MODELS.values())}: train them with configs/facts.py")
    import xfresearch as xf
    from docs.facts_page import draw
    from xfresearch.runtime.hardware import environment

    for name, path in there.items():
        lm = xf.load(path)
        of_model = written.setdefault(name, about(lm, path))
        for item, measure in measurements(lm, of_model, published=name == "dense"):
            began = time.perf_counter()
            value = measure()
            of_model[item] = {"seconds": round(time.perf_counter() - began, 1), **value, **environment()}
            kept.write_text(json.dumps(written, indent=1) + "\n")
            if item == "trace":
                draw(written, HERE / "questions")


def about(lm, path: Path) -> dict:
    """The parameters, the updates and the minutes of training."""
    import jax

    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    seconds = max(row["seconds"] for row in rows if row["kind"] == "train")
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(lm.params)),
        "updates": lm.step,
        "minutes": round(seconds / 60, 1),
    }


def measurements(lm, of_model: dict, published: bool) -> Iterator[Item]:
    """Each item that is missing in `of_model`, in order: later ones use the results of earlier ones.

    published: also ROME and MEMIT with the keys of the published code.
    """
    from xfresearch import editing

    tuning, more, requests = facts_to_edit(lm)
    edits = Edits(lm, of_model)
    first = {"recall": recall, "place": lambda lm: {"name": editing.traced(lm, tuning)}, "trace": trace}
    for item, measure in first.items():
        if item not in of_model:
            yield item, partial(measure, lm)
    for method, grid in GRIDS.items():
        yield from edits.tuned(f"{method}, tuning", method, tuning, grid, True)
        yield from edits.row(f"{method}, alone", method, requests, of_model[f"{method}, tuning"]["settings"], True)
    for method, grid in GRIDS_OF_MANY.items():
        yield from edits.tuned(f"{method}, tuning of many", method, more, grid, False)
        settings = of_model[f"{method}, tuning of many"]["settings"]
        for count in SEQUENCE:
            yield from edits.row(f"{method}, {count} in one model", method, requests[:count], settings, False)
    if published:
        settings = of_model["rome, tuning"]["settings"] | {"key": "published"}
        yield from edits.row("rome, published keys", "rome", requests, settings, True, ", published keys")
        settings = of_model["memit, tuning of many"]["settings"] | {"key": "mean"}
        yield from edits.row("memit, mean keys", "memit", requests, settings, False, ", mean keys")


def facts_to_edit(lm) -> tuple[list, list, list]:
    """Three lists of requests: to choose settings of single edits, to choose those of many edits in one model, and for the
    figures. No fact is in two lists."""
    from xfresearch import editing
    from xfresearch.editing.requests import known_facts

    known = known_facts(lm)
    chosen = editing.drawn(known, EDITS + ALONE)
    used = {(record.subject, record.relation) for record in chosen}
    more = [each for each in editing.drawn(known, 2 * MANY, seed=1) if (each.subject, each.relation) not in used][:MANY]
    return chosen[:ALONE], more, chosen[ALONE:]


class Edits(NamedTuple):
    """The edits of one model that are measured. What has a result in `of_model` is not measured again."""

    lm: object  # a LanguageModel
    of_model: dict  # results by item

    def row(self, item: str, method: str, asked: list, settings: dict, alone: bool, note: str = "") -> Iterator[Item]:
        """The results of a method with its settings."""
        if not settings.items() <= self.of_model.get(item, {}).get("settings", {}).items():
            yield item, partial(self.edited, method, asked, settings, alone, note)

    def tuned(self, item: str, method: str, asked: list, grid: list[dict], alone: bool) -> Iterator[Item]:
        """The settings of the grid with the largest S, and S of all of them."""
        tried = [(settings, S) for settings, S in self.of_model.get(item, {}).get("tried", []) if settings in grid]
        left = [settings for settings in grid if settings not in [each for each, _ in tried]]

        def measure() -> dict:
            new = [(settings, self.edited(method, asked, settings, alone)["metrics"]["S"]["after"]) for settings in left]
            every = sorted(tried + new, key=lambda each: grid.index(each[0]))
            return {"settings": max(every, key=lambda each: each[1])[0], "tried": every}

        if left:
            yield item, measure

    def edited(self, method: str, asked: list, settings: dict, alone: bool, note: str = "") -> dict:
        """The metrics of the edits, in the memory that the trace has found."""
        from xfresearch import editing
        from xfresearch.editing.memit import LAYERS
        from xfresearch.editing.optimise import DEFAULT
        from xfresearch.editing.requests import memories_up_to

        last = self.of_model["place"]["name"]
        memory = {"memories": memories_up_to(self.lm, last, LAYERS)} if method == "memit" else {"memory": last}
        given = dict(settings)
        if method == "rome" and "largest" in given:
            given["settings"] = DEFAULT._replace(largest=given.pop("largest"))
        report = editing.METHODS[method](self.lm, asked, **memory, **given, alone=alone)[1].as_dict()
        collected = {"method": method.replace("_", " ") + note, "alone": alone, "edits": len(asked)}
        collected |= {name: report[name] for name in ("settings", "metrics", "before", "after")}
        return collected | {"failures": len(report["failures"])}


def recall(lm) -> dict:
    from xfresearch import analysis

    return {"summary": analysis.recall(lm).summary}


def trace(lm) -> dict:
    """Means of the indirect effects, by value, layer and class of tokens."""
    from xfresearch import analysis
    from xfresearch.analysis.tracing import sites_of

    result = analysis.trace(lm, count=TRACED, samples=1)  # the mean over the facts is one over draws, too
    values = {value: np.round(result.data[value], 5).tolist() for value in sites_of(lm.config)}
    p_values = {value: result.data[f"{value}_p"] for value in values}
    return {"facts": len(result.data["clean"]), "summary": result.summary, "values": values, "p": p_values}


if __name__ == "__main__":
    run(main)
