"""Writes small files in the format of the local tasks, with made-up text."""

import json
from pathlib import Path

WORDS = ["river", "stone", "paper", "lamp", "garden", "winter", "copper", "bread", "mirror", "cloud"]


def _choices(i: int, count: int) -> dict:
    return {
        "choices": [f"the {WORDS[(i + k) % 10]} {WORDS[(3 * i + k) % 10]}" for k in range(count)],
        "gold": i % count,
    }


def _question(i: int) -> str:
    return f"Question: what is kept near the {WORDS[i % 10]} in house {i}?"


def _cloze(i: int) -> dict:
    return {"context": f"In house {i} the {WORDS[i % 10]} stands beside the", "continuation": WORDS[(i + 3) % 10]}


FORMS = {
    "arc_easy.jsonl": lambda i: {"query": _question(i), **_choices(i, 4)},
    "arc_challenge.jsonl": lambda i: {"query": _question(i), **_choices(i, 4)},
    "piqa.jsonl": lambda i: {"query": _question(i) + "\n", **_choices(i, 2)},
    "hellaswag_val_olmo_subset.jsonl": lambda i: {"query": f"Houses: in house {i}, someone", **_choices(i, 4)},
    "boolq.jsonl": lambda i: {
        "query": f"Passage: House {i} has a {WORDS[i % 10]}.\n{_question(i)}",
        "choices": ["no", "yes"],
        "gold": i % 2,
    },
    "winogrande.jsonl": lambda i: {
        "context_options": [f"Ann met Eve in house {i}, so {name}" for name in ("Ann", "Eve")],
        "continuation": f"took the {WORDS[i % 10]}.",
        "gold": i % 2,
    },
    "lambada_openai.jsonl": _cloze,
    "jeopardy_all.jsonl": lambda i: _cloze(i) | {"category": "houses"},
    "bigbench_qa_wikidata.jsonl": _cloze,
    "bigbench_dyck_languages.jsonl": lambda i: {"context": f"{i}\nInput: [ ( <\nOutput:", "continuation": "> ) ]"},
}


def write(folder: Path, items: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, form in FORMS.items():
        (folder / name).write_text("".join(json.dumps(form(i)) + "\n" for i in range(items)))
    return folder
