"""The table of docs/performance.md, what GPUs say beside the goals, and those of docs/data/tables/measurements.md.

docs/data/gpu/ has one file per session on a GPU, as `bench gpu --json` writes it; docs/data/performance/ has files of
`bench update --json`, docs/data/sweeps/ of its --sweep, docs/data/decoding/ of `bench decode --json`, docs/data/saving/ of
`bench save --json`.
"""

import json
from pathlib import Path

DATA = Path(__file__).parent / "data"
NOT_MEASURED = "not measured"
# What is asked of a GPU, its goal on one H100 or H200 in bfloat16, and the row of `bench gpu` that answers.
GOALS = (
    ("`make gpu` whole: nothing fails, resume bit for bit or the difference explained", "all rows", "all"),
    ("gpt2 124M, length 1024", "1.05 of `torch.compile` in the same run; MFU 0.46", "update_gpt2"),
    ("Llama 1B, length 2048", "1.05 of `torch.compile`; MFU 0.57; at most 1.15 of its memory", "update_llama"),
    ("top-2 of 8 experts, 0.5B to 1B", "MFU 0.36; 0.8 of the dense model of equal active FLOPs", "update_moe"),
    ("all-attention, slots", "0.95 of its dense equal", "update_all_attention"),
    ("biased attention (ALiBi, T5, relative, sinks, document masks)", "0.85 of the RoPE model", "update_biased"),
    (
        "lambda, differential, merged QK, no W_Q, single heads, macaron, value residual",
        "0.7 of dense MFU each, or why not",
        "update_variants",
    ),
    (
        "decoding, batch 1 and 64, 124M",
        "1.5 of `transformers` with a static cache and compile; share of the memory-bound floor",
        "decode",
    ),
    ("decoding, batch 1 and 64, 1B", "the same", "decode_1b"),
    ("loop beside the bare update", "0.98", "loop"),
    ("growth: length 512 to 16k, width, depth, experts, slots", "exponents beside the expected", "growth"),
    ("float32 studies mapped over seeds", "times of one seed", "studies"),
    ("ladder: 10M and 30M rungs of w_q, norms, single_heads, w_o, then the playground's tasks", "verdicts", "ladder"),
)
ONLY = "`python -m xfresearch.bench gpu --only {}`"
# Where a row of `bench gpu` of that name is not all that answers.
COMMANDS = {
    "all": "`make gpu`",
    "decode": ONLY.format("decode,decode_64,decode_peer,decode_peer_64"),
    "decode_1b": ONLY.format("decode_1b,decode_1b_64,decode_1b_peer"),
    "update_variants": ONLY.format("update_variants,update_thin"),
    "growth": ONLY.format("growth") + ", and `bench update --grow` with `width`, `depth` or `experts`",
    "ladder": "`python -m xfresearch.study --config configs/studies/w_q.py --workdir studies/w_q --add-rung 30m`",
}
UPDATES = "| row | ms | quartiles | tokens/s | MFU | GB | compile, s | speed |\n|---|---|---|---|---|---|---|---|\n"
DECODING = "| row | tokens/s | ms per step | quartiles | floors | speed |\n|---|---|---|---|---|---|\n"


def tables() -> str:
    """On a GPU, beside the goals."""
    sessions = _files("gpu")
    return f"{goals(sessions)}\n{waiting(sessions)}"


def measurements() -> str:
    """The page of updates and decoding on CPUs, of what each session on a GPU measured, of options, and of saving."""
    parts = ["# More measurements\n", "How they were made: [performance](../../performance.md).\n"]
    parts += ["## Updates on a CPU\n", *map(updates, _files("performance"))]
    parts += ["## Decoding on a CPU\n", *map(decoding, _files("decoding"))]
    parts += map(_session, _files("gpu"))
    parts += ["## Options of execution on a CPU\n", *map(sweep, _files("sweeps"))]
    return "\n".join([*parts, "## Saving on a CPU\n", *map(saving, _files("saving"))])


def _files(folder: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((DATA / folder).glob("*.json"))]


def goals(sessions: list[dict]) -> str:
    """Every row that a GPU is asked, with its goal and what each session says of it."""
    heads = [f"{_device(session)}, {session['commit'][:7]}" for session in sessions]
    lines = [f"| row | goal | {' | '.join(heads)} |\n", "|---" * (2 + len(heads)) + "|\n"]
    for words, goal, row in GOALS:
        lines.append(f"| {words} | {goal} | {' | '.join(_answer(session, row) for session in sessions)} |\n")
    return "".join(lines)


def waiting(sessions: list[dict]) -> str:
    """Which rows have no figure, why not, and the command that measures each."""
    newest = max(session["date"] for session in sessions)
    about = f"The newest session was on {newest}; no GPU has been at hand since. So no figure is of a later commit. Rows\n"
    about += "without one are those that no session came to, or that it stopped:\n"
    lines = [about, "| row | figure | command |", "|---|---|---|"]
    for words, _, row in GOALS:
        lines.append(f"| {words} | {_figures(sessions, row)} | {COMMANDS.get(row, ONLY.format(row))} |")
    return "\n".join(lines) + "\n"


def _figures(sessions: list[dict], name: str) -> str:
    """The commits that have a figure of a row, or why there is none."""
    asked = {session["commit"][:7]: row for session in sessions if (row := _row(session, name))}
    ended = [commit for commit, row in asked.items() if row["status"] in ("ok", "failed")]
    why = [f"none: {row['words']} ({commit})" for commit, row in asked.items()] or ["none: no session came to it"]
    return ", ".join(ended) if ended else "; ".join(why)


def _device(session: dict) -> str:
    return session["machine"]["devices"].removeprefix("1 x ")


def _row(session: dict, name: str) -> dict | None:
    """A row of a session; None if it did not come to it. Without a row 'all', its other rows say how it went."""
    rows = session["rows"]
    if name == "all" and name not in rows:
        return {"status": "ok", "words": f"{sum(row['status'] == 'ok' for row in rows.values())} of {len(rows)} rows are ok"}
    return rows.get(name)


def _answer(session: dict, name: str) -> str:
    row = _row(session, name)
    if not row:
        return NOT_MEASURED
    failed = "" if row["status"] == "ok" else f"{row['status']}: "
    return (NOT_MEASURED + ": " if row["status"] == "not run" else failed) + row["words"]


def _session(session: dict) -> str:
    """Where a session was, its other rows, and its tables."""
    by = session.get("measured_by", "`bench gpu`")
    text = f"## {_device(session)}, commit {session['commit'][:12]}\n\n"
    text += f"Measured on {session['date']} by {by}, {_versions(session)}.\n"
    known = {row for *_, row in GOALS}
    others = {name: row for name, row in session["rows"].items() if name not in known}
    if others:
        text += "\n| row | outcome | seconds | figures |\n|---|---|---|---|\n"
        cells = [f"| {name} | {row['status']} | {row['seconds']:.0f} | {row['words']} |\n" for name, row in others.items()]
        text += "".join(cells)
    for title, table in session.get("tables", {}).items():
        lines = [" | ".join(each) for each in (table["titles"], ["---"] * len(table["titles"]), *table["cells"])]
        text += f"\n{title}:\n\n" + "".join(f"| {line} |\n" for line in lines)
    return text + "".join(f"\n{note}\n" for note in session.get("notes", ()))


def _versions(environment: dict) -> str:
    versions = environment["versions"]
    shown = [f"{name} {versions[name]}" for name in ("jax", "cuda", "torch") if name in versions]
    return ", ".join(shown)


def updates(file: dict) -> str:
    """The rows of one file of `bench update`, with the command that wrote it."""
    lines = []
    for row in file["rows"]:
        if row["error"]:
            lines.append(f"| `{row['config']}` | {row['error']} | | | | | | |\n")
            continue
        cells = [f"`{row['config']}`", f"{row['ms']:.1f}", f"{row['ms_low']:.1f} to {row['ms_high']:.1f}"]
        cells += [f"{row['tokens/s']:,.0f}", f"{row['MFU']:.3f}", _or_dash(row["memory_bytes"], 1e-9, ".2f")]
        cells.append(_or_dash(row["compile_seconds"], 1, ".1f"))
        cells.append(f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})")
        lines.append(f"| {' | '.join(cells)} |\n")
    about = f"`{command(file['arguments'])}`\n\n({_where(file)}. MFU is relative to {file['peak_source']}.)\n\n"
    return about + UPDATES + "".join(lines)


def sweep(file: dict) -> str:
    """What each value of an option does to a config's speed and memory, by `bench update --sweep`."""
    lines = []
    for row in file["rows"]:
        name = f"`{row['option']}={row['value']}`" if row["value"] else row["option"]
        speed = row["error"] or f"{row['speed']:.2f} ({row['speed_low']:.2f} to {row['speed_high']:.2f})"
        lines.append(f"| {name} | {speed} | {_or_dash(row.get('GB'), 1, '.2f')} |\n")
    chosen = " ".join(f"--config.{key}={value}" for key, value in file["overrides"].items())
    about = f"`{command(file['arguments'])}`\n\n({_where(file)}. Each value stands beside the best so far.)\n\n"
    end = f"\nIt says: use `{chosen}`.\n" if chosen else "\nNothing is faster than the config as it is.\n"
    return about + "| value | speed | GB |\n|---|---|---|\n" + "".join(lines) + end


def saving(file: dict) -> str:
    """The row of a file of `bench save`, with the command that wrote it."""
    row = file["row"]
    cells = [f"{row[name]:.2f}" for name in ("now", "before", "digests", "sums", "finite")]
    cells.append(f"{row['ratio']:.2f} ({row['lower']:.2f} to {row['upper']:.2f})")
    words = "now: with digests and a look whether the state is finite; before: with the sums of earlier versions alone"
    head = "| save now, s | before, s | digests, s | sums, s | finite, s | now/before |\n" + "|---" * len(cells) + "|\n"
    asked = {name: value for name, value in file["arguments"].items() if value and name != "operation"}
    flags = " ".join(f"--{name} {value}" for name, value in asked.items())
    about = f"`python -m xfresearch.bench save {flags}`\n\n({_where(file)}; {words}.)\n\n"
    return f"{about}{head}| {' | '.join(cells)} |\n"


def decoding(file: dict) -> str:
    """The rows of one file of `bench decode`, with the command that wrote it."""
    lines = []
    for row in file["rows"]:
        cells = [f"`{row['model']}`", f"{row['tokens/s']:.1f}", f"{row['ms']:.2f}"]
        cells += [f"{row['ms_low']:.2f} to {row['ms_high']:.2f}", f"{row['floors']:.2f}"]
        cells.append(f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})")
        lines.append(f"| {' | '.join(cells)} |\n")
    about = f"`{command(file['arguments'])}`\n\n({_where(file)}. A floor is the reading of the parameters at "
    return f"{about}{file['rows'][0]['read bytes/s'] / 1e9:.0f} GB/s, measured then.)\n\n{DECODING}" + "".join(lines)


def _where(file: dict) -> str:
    machine = file["machine"]
    return f"{machine['cores']} cores of {machine['cpu']}, {file['date']}, commit {file['commit'][:12]}, {_versions(file)}"


def command(arguments: dict) -> str:
    operation = arguments["operation"]
    words = [f"python -m xfresearch.bench {operation}", *(f"--config {name}" for name in arguments["config"])]
    words += [f"--batch {arguments['batch']}"] if operation == "decode" else []
    words += [*arguments["overrides"], f"--rounds {arguments['rounds']}"]
    words += ["--sweep"] if arguments.get("sweep") else []
    words += [f"--against {arguments['against']}"] if arguments["against"] else []
    return " ".join(words)


def _or_dash(value, factor: float, form: str) -> str:
    return "-" if value is None else format(factor * value, form)
