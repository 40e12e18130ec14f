"""The tables of docs/data/tables/rooms.md, of docs/data/rooms.json (tests/contracts/outcomes.py)."""

import json
from pathlib import Path

FILE = Path(__file__).parent / "data" / "rooms.json"
HEAD = """# Every variant in every room

What each variant of the [contracts](../../adding.md#check-it) gives in each room: a result (`yes`), or the number of a
[refusal](#refusals); `?` was not computed yet. A room is what a command does with a model: it captures, generates, exports,
draws, analyses, edits or converts. Models have random parameters, so a result says that the room works, not that its figures
mean something. Analyses and conversions have the options of `tests/contracts/rooms.py`; others may be refused, or not.

`python -m tests.contracts.outcomes` (`make rooms`) computes what is missing; `NAME ...` computes variants or rooms again.

"""


def page() -> str:
    """The page: rooms, conversions, and the refusals."""
    written = json.loads(FILE.read_text())
    rows = {name: row.split() for name, row in written["rows"].items()}
    conversions = [room for room in written["rooms"] if room.startswith("convert ")]
    others = [room for room in written["rooms"] if room not in conversions]
    parts = [HEAD]
    for title, rooms in (("Analyses, edits and others", others), ("Conversions", conversions)):
        places = [written["rooms"].index(room) for room in rooms]
        parts.append(f"## {title}\n\n| variant |" + "".join(f" {room.removeprefix('convert ')} |" for room in rooms) + "\n")
        parts.append("|---" * (len(rooms) + 1) + "|\n")
        for name, numbers in rows.items():
            parts.append(f"| `{name}` |" + "".join(f" {_cell(numbers[place])} |" for place in places) + "\n")
        parts.append("\n")
    parts.append("## Refusals\n\n")
    parts += [f"{number}. {_escaped(text)}\n" for number, text in enumerate(written["refusals"], 1)]
    return "".join(parts)


def _cell(number: str) -> str:
    return {"0": "yes", "-1": "?"}.get(number, number)


def _escaped(text: str) -> str:
    """A refusal as Markdown shows it: it has products, indices and names of options."""
    for character in "\\*_<[":
        text = text.replace(character, f"\\{character}")
    return text
