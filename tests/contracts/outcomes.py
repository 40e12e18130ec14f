"""The outcome of every room for every variant, in docs/data/rooms.json: a result, or the words of the refusal.

    python -m tests.contracts.outcomes                    what is missing; from nothing about an hour of a core
    python -m tests.contracts.outcomes NAME ...           these variants and rooms again: base, 'convert stack'

Quick rooms come first, and then variants with something that no earlier one has. It writes after each variant, and goes on
after an interruption. A room that raises anything but a refusal in one line is printed and has no outcome; the exit code is
1 then. `python -m docs.write` makes a page of the file.
"""

import sys
import time
from pathlib import Path

import tests.conftest  # noqa: F401 - it sets what makes JAX compile quickly
from xfresearch.runtime.command import run
from xfresearch.runtime.errors import UserError, require
from xfresearch.runtime.files import read_object, write_json

FILE = Path(__file__).parent.parent.parent / "docs" / "data" / "rooms.json"
RESULT = ""  # the outcome of a room that gives one


def outcome(room: str, name: str) -> str:
    """The words of the refusal, or RESULT. Raises AssertionError for anything else."""
    from tests.contracts.rooms import ROOMS, model_of

    lm = model_of(name)
    try:
        ROOMS[room](lm)
    except UserError as refused:
        assert str(refused) and "\n" not in str(refused), f"{room}: not one line: {refused}"
        return str(refused)
    except Exception as bug:
        raise AssertionError(f"{room}: {bug!r}") from bug
    return RESULT


def read() -> dict[str, dict[str, str]]:
    """{variant: {room: outcome}}. A row of the file has a number for each room: that of the refusal, from 1 on, 0 for a
    result, -1 for what is missing."""
    if not FILE.exists():
        return {}
    kept = read_object(FILE)
    texts = [RESULT, *kept["refusals"]]
    rows = {}
    for name, row in kept["rows"].items():
        numbers = zip(kept["rooms"], map(int, row.split()), strict=True)
        rows[name] = {room: texts[number] for room, number in numbers if number >= 0}
    return rows


def write(rows: dict[str, dict[str, str]], rooms: list[str]) -> None:
    """Each refusal is kept once."""
    refusals = dict.fromkeys(text for row in rows.values() for text in row.values() if text != RESULT)
    numbers = {text: number for number, text in enumerate((RESULT, *refusals))} | {None: -1}
    kept = {name: " ".join(str(numbers[row.get(room)]) for room in rooms) for name, row in rows.items()}
    write_json(FILE, {"rooms": rooms, "refusals": list(refusals), "rows": kept})


def computed(name: str, rooms: list[str]) -> tuple[dict[str, str], list[str]]:
    """{room: outcome} of a variant, and a line for each room that has none."""
    import jax  # after tests.conftest

    collected, wrong = {}, []
    for room in rooms:
        try:
            collected[room] = outcome(room, name)
        except AssertionError as error:
            wrong.append(str(error))
    jax.clear_caches()  # LLVM ends a process with too many programs
    return collected, wrong


def main(names: list[str]) -> None:
    from tests.contracts.rooms import EVERY, QUICK, ROOMS
    from tests.contracts.variants import DISTINCT

    variants, rooms = ([name for name in names if name in table] for table in (EVERY, ROOMS))
    require(len(names) == len(variants) + len(rooms), "NAME", names, "variants and rooms")
    rows = {name: row for name, row in read().items() if name in EVERY}
    again = {(name, room) for name in variants or EVERY for room in rooms or ROOMS} if names else set()
    bugs = 0
    for some in (QUICK, [room for room in ROOMS if room not in QUICK]):
        for name in sorted(EVERY, key=lambda name: name not in DISTINCT):
            kept = rows.get(name, {})
            if todo := [room for room in some if ((name, room) in again if names else room not in kept)]:
                started = time.time()
                result, wrong = computed(name, todo)
                rows[name] = kept | result
                write({each: rows[each] for each in EVERY if each in rows}, list(ROOMS))
                print(f"{name}, {len(todo)} rooms: {time.time() - started:.0f} s", *wrong, sep="\n    ", flush=True)
                bugs += len(wrong)
    sys.exit(min(bugs, 1))


if __name__ == "__main__":
    run(main)
