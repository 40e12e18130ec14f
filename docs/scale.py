"""Makes the tables of docs/plan.md from the plans of `python -m xfresearch.planning.named`."""

from xfresearch.planning.report import PEAK

EVERY = "every config"  # a page of its own, docs/data/tables/plans.md
TITLES = {
    "large": "Large models, compared with MaxText on the same shape and machine",
    "weak scaling": "Weak scaling",
    "depth": "Compile time and depth",
    EVERY: "Every named config on three machines",
}
# Ranges go from not overlapped to overlapped.
PLAN = "| config | machine | mesh | sequences | remat | memory | step, s | utilisation, % | tokens/s/chip "
PLAN += "| slowest collective |\n"


def tables(rows: dict[str, dict]) -> str:
    from xfresearch.planning.named import named

    names = [plan.name for plan in named()]
    done = sum(name in rows for name in names)
    rows = dict(sorted(rows.items(), key=lambda item: names.index(item[0]) if item[0] in names else len(names)))
    parts = [f"{done} of {len(names)} named plans are compiled; `make plans` compiles the rest.\n"]
    for group, title in TITLES.items():
        listed = [row for row in rows.values() if row["group"] == group]
        if group == EVERY:
            parts.append(f"### {title}\n\n{about(listed)} [The table](data/tables/plans.md) has {len(listed)} rows.\n")
        elif listed:
            parts.append(f"### {title}\n\n{about(listed)}\n\n{GROUPS.get(group, plans)(listed)}")
    return "\n".join(parts)


def about(rows: list[dict]) -> str:
    """One sentence: dates, commits and versions of the plans."""

    def all_of(*path: str) -> str:
        collected = []
        for row in rows:
            for name in path:
                row = row.get(name, "?")
            collected.append(str(row))
        return ", ".join(sorted(set(collected)))

    commits = ", ".join(sorted({row["commit"][:12] for row in rows}))
    compiler = f"jax {all_of('versions', 'jax')}, libtpu {all_of('versions', 'libtpu')}"
    return f"Compiled on {all_of('date')} at commit {commits}, {compiler}."


def plans(rows: list[dict]) -> str:
    return PLAN + "|---" * 10 + "|\n" + "".join(f"| {' | '.join(cells(row))} |\n" for row in rows)


def cells(row: dict) -> list[str]:
    config = f"`{row['config'].removeprefix('configs/')}`"
    if "error" in row:
        return [config, *[""] * 8, row["error"].replace("|", "/")]
    mesh = ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items() if size > 1)
    memory = row["memory"]
    start = [config, row["topology"]["name"], mesh, str(row["batch"]["sequences"]), row["remat"]]
    share = f"{100 * memory['total'] / memory['available']:.0f} %"
    if not memory["fits"]:
        return [*start, f"{share}: does not fit", "", "", "", ""]
    rate = [r / row["topology"]["chips"] for r in row["tokens_per_second"]]
    times = (
        _range(row["step_seconds"], "{:.3g}"),
        " to ".join(utilisation(value) for value in row["utilisation"]),
        _range(rate, "{:,.0f}"),
    )
    return [*start, share, *times, _slowest_collective(row)]


def utilisation(value: float) -> str:
    """In percent. No program reaches the chip's peak."""
    return f"{100 * value:.0f}" if value < PEAK else "below the peak"


def _percent(values) -> list[float]:
    return [100 * value for value in values]


def _range(values, form: str) -> str:
    return " to ".join(form.format(value) for value in values)


def _slowest_collective(row: dict) -> str:
    if not row["collectives"]:
        return "none"
    first = row["collectives"][0]
    share = first["seconds"] / row["step_seconds"][0]
    words = f"{100 * share:.0f} %" if share < 0.995 else "nearly all"
    return f"{first['kind']} over {' '.join(first['axes'])}, {words} of the step"


def large(rows: list[dict]) -> str:
    """The plans, and the midpoint of each range relative to MaxText's figure, counted in MaxText's convention."""
    lines = [
        plans(rows),
        "| config | machine | ours, half of attention | MaxText | our midpoint / MaxText |\n|---|---|---|---|---|\n",
    ]
    for row in rows:
        if not row.get("utilisation"):
            continue
        ours = [value * row["half_attention"] for value in row["utilisation"]]
        ratio = sum(ours) / 2 / row["published"]
        names = f"`{row['config'].removeprefix('configs/')}` | {row['topology']['name']}"
        lines.append(f"| {names} | {_range(_percent(ours), '{:.1f}')} | {100 * row['published']:.1f} | {ratio:.2f} |\n")
    return "\n".join(lines[:2]) + "".join(lines[2:])


def scaling(rows: list[dict]) -> str:
    """The plans, and tokens per second per chip relative to the smallest machine."""
    first = next((row for row in rows if row.get("utilisation")), None)
    lines = [plans(rows), "| chips | tokens/s/chip relative to the smallest machine |\n|---|---|\n"]
    for row in rows:
        if row.get("utilisation"):
            ratio = [a / b for a, b in zip(row["utilisation"], first["utilisation"], strict=True)]
            lines.append(f"| {row['topology']['chips']} | {_range(ratio, '{:.2f}')} |\n")
    return "\n".join(lines[:2]) + "".join(lines[2:])


def depth(rows: list[dict]) -> str:
    lines = [
        f"| {row['overrides'][-1].split('=')[-1]} | {row['compile_seconds']:.0f} |\n"
        for row in rows
        if "compile_seconds" in row
    ]
    return "| layers | seconds to compile |\n|---|---|\n" + "".join(lines)


GROUPS = {"large": large, "weak scaling": scaling, "depth": depth}
