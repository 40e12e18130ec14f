"""Measures what docs/questions/where_is_a_fact.md says: python -m docs.facts [--runs DIR]

For each model in DIR (runs/facts, runs/facts_all_attention, runs/facts_experts, trained with configs/facts.py): recall, the
trace, and edits of facts by every method. docs/data/facts.json gets the figures, the seconds, the machine and the commit as
they come; what it has already is not measured again. The settings of each method are chosen on other facts than those of the
figures.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from xfresearch.command import Parser, run
from xfresearch.errors import UserError

HERE = Path(__file__).parent
MODELS = {"dense": "facts", "all-attention": "facts_all_attention", "top-2 of 8 experts": "facts_experts"}
TRACED, EDITS, TUNING = 1000, 100, 10
TOGETHER = 30  # requests that choose the settings of MEMIT, which makes them at once
SEQUENCE = (100, 10)  # numbers of edits in one model
# Settings to choose from, by S.
GRIDS = {
    "rome": [{"ridge": ridge} for ridge in (1e-2, 1.0, 10.0)],
    "memit": [{"ridge": 1e-2, "weight": weight} for weight in (20.0, 200.0, 2000.0)],
    "finetune": [{"rate": rate} for rate in (5e-5, 1e-4, 2e-4, 5e-4, 2e-3)],
    "constrained_finetune": [{"rate": 2e-2, "largest": largest} for largest in (2e-3, 5e-3, 1e-2, 2e-2)],
}


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m docs.facts", description=__doc__)
    parser.add_argument("--runs", default="runs", metavar="DIR", help="directory of the runs (default: runs)")
    options = parser.parse_args(arguments)
    kept = HERE / "data" / "facts.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    workdirs = {name: Path(options.runs) / folder for name, folder in MODELS.items()}
    there = {name: path for name, path in workdirs.items() if (path / "checkpoints").exists()}
    if not there:
        raise UserError(f"--runs={options.runs} has none of {', '.join(MODELS.values())}: train them with configs/facts.py")
    import xfresearch as xf
    from docs.comparison import environment
    from docs.facts_page import draw

    for name, path in there.items():
        lm = xf.load(path)
        of_model = found.setdefault(name, about(lm, path))
        for item, measure in measurements(lm, of_model).items():
            if item not in of_model:
                began = time.perf_counter()
                value = measure()
                of_model[item] = {"seconds": round(time.perf_counter() - began, 1), **value, **environment()}
                kept.write_text(json.dumps(found, indent=1) + "\n")
                if item == "trace":
                    draw(found, HERE / "questions")


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


def measurements(lm, of_model: dict) -> dict[str, Callable[[], dict]]:
    """{item: function that measures it}, in order: later ones use the results of earlier ones."""
    from xfresearch import editing
    from xfresearch.editing.memit import LAYERS
    from xfresearch.editing.requests import known_facts, memories

    known = known_facts(lm)
    chosen = editing.drawn(known, EDITS + TUNING)
    tuning, requests = chosen[:TUNING], chosen[TUNING:]
    used = {(record.subject, record.relation) for record in chosen}
    others = [each for each in editing.drawn(known, 2 * TOGETHER, seed=1) if (each.subject, each.relation) not in used]
    items = {"recall": lambda: recall(lm), "place": lambda: {"name": editing.traced(lm, tuning)}}

    def place(method: str) -> dict:
        last = of_model["place"]["name"]
        return {"places": memories(lm, last, LAYERS)} if method == "memit" else {"place": last}

    def tuned(method: str) -> dict:
        return place(method) | of_model[f"{method}, tuning"]["settings"]

    items["trace"] = lambda: trace(lm)
    for method in GRIDS:
        ours = others[:TOGETHER] if method == "memit" else tuning
        items[f"{method}, tuning"] = lambda method=method, ours=ours: tune(lm, method, ours, place(method))
        if method != "memit":
            items[f"{method}, alone"] = lambda method=method: alone(lm, method, requests, tuned(method))
        for count in SEQUENCE:
            arguments = lm, method, requests[:count]
            items[f"{method}, {count} in one model"] = lambda a=arguments, method=method: together(*a, tuned(method))
    mean_keys = {"key": "mean"}  # as in the published code
    items["memit with mean keys, 100 in one model"] = lambda: together(lm, "memit", requests, tuned("memit") | mean_keys)
    if not any(getattr(block.attention, "memory_slots", 0) for block in lm.config.blocks.values()):  # rome.py refuses slots
        items["rome, alone, published keys"] = lambda: alone(lm, "rome", requests, tuned("rome") | {"key": "published"})
    return items


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


def tune(lm, method: str, requests, place: dict) -> dict:
    """The settings with the largest S, and S of all of them."""
    tried = []
    for settings in GRIDS[method]:
        measure = together if method == "memit" else alone
        tried.append((settings, measure(lm, method, requests, place | settings)["metrics"]["S"]["after"]))
    best = max(tried, key=lambda each: each[1])
    return {"settings": best[0], "tried": tried}


def alone(lm, method: str, requests, settings: dict) -> dict:
    from xfresearch import editing

    return figures(editing.METHODS[method](lm, requests, **settings, alone=True)[1])


def together(lm, method: str, requests, settings: dict) -> dict:
    from xfresearch import editing

    return figures(editing.METHODS[method](lm, requests, **settings)[1])


def figures(report) -> dict:
    found = report.as_dict()
    return {name: found[name] for name in ("settings", "metrics", "before", "after")} | {"failures": len(report.failures)}


if __name__ == "__main__":
    run(main)
