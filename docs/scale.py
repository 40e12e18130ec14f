"""The tables of docs/scale.md, from the plans that `python -m xfresearch.planning.named` wrote."""

TITLES = {
    "large": "Large models, beside what MaxText reports for the same shape and machine",
    "weak scaling": "Weak scaling",
    "depth": "Compile time and depth",
    "every config": "Every named config on three machines",
}
# Not overlapped and overlapped, in percent.
PLAN = "| config | machine | mesh | sequences | remat | memory | step, s | utilisation, % | tokens/s/chip "
PLAN += "| longest collective |\n"


def tables(rows: dict[str, dict]) -> str:
    from xfresearch.planning.named import named

    asked = [plan.name for plan in named()]
    done = sum(name in rows for name in asked)
    rows = dict(sorted(rows.items(), key=lambda item: asked.index(item[0]) if item[0] in asked else len(asked)))
    parts = [f"{done} of {len(asked)} named plans are compiled; `make plans` compiles the others.\n"]
    for group, title in TITLES.items():
        found = [row for row in rows.values() if row["group"] == group]
        if found:
            parts.append(f"### {title}\n\n{about(found)}\n\n{GROUPS.get(group, plans)(found)}")
    return "\n".join(parts)


def about(rows: list[dict]) -> str:
    def all_of(*path: str) -> str:
        found = []
        for row in rows:
            for name in path:
                row = row.get(name, "?")
            found.append(str(row))
        return ", ".join(sorted(set(found)))

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
        _both(row["step_seconds"], "{:.3g}"),
        _both(_percent(row["utilisation"]), "{:.0f}"),
        _both(rate, "{:,.0f}"),
    )
    return [*start, share, *times, _longest(row)]


def _percent(values) -> list[float]:
    return [100 * value for value in values]


def _both(values, form: str) -> str:
    return " to ".join(form.format(value) for value in values)


def _longest(row: dict) -> str:
    if not row["collectives"]:
        return "none"
    first = row["collectives"][0]
    share = first["seconds"] / row["step_seconds"][0]
    return f"{first['kind']} over {' '.join(first['axes'])}, {100 * share:.0f} % of the step"


def large(rows: list[dict]) -> str:
    """The plans, and the middle of each bracket against the published figure in its convention."""
    lines = [
        plans(rows),
        "| config | machine | ours, attention in half | MaxText | middle of ours over MaxText's |\n|---|---|---|---|---|\n",
    ]
    for row in rows:
        if not row.get("utilisation"):
            continue
        ours = [value * row["half_attention"] for value in row["utilisation"]]
        error = sum(ours) / 2 / row["published"]
        names = f"`{row['config'].removeprefix('configs/')}` | {row['topology']['name']}"
        lines.append(f"| {names} | {_both(_percent(ours), '{:.1f}')} | {100 * row['published']:.1f} | {error:.2f} |\n")
    return "\n".join(lines[:2]) + "".join(lines[2:])


def scaling(rows: list[dict]) -> str:
    """The plans, and tokens per second and chip against the smallest machine's."""
    first = next((row for row in rows if row.get("utilisation")), None)
    lines = [plans(rows), "| chips | tokens/s/chip over those of the smallest |\n|---|---|\n"]
    for row in rows:
        if row.get("utilisation"):
            ratio = [a / b for a, b in zip(row["utilisation"], first["utilisation"], strict=True)]
            lines.append(f"| {row['topology']['chips']} | {_both(ratio, '{:.2f}')} |\n")
    return "\n".join(lines[:2]) + "".join(lines[2:])


def depth(rows: list[dict]) -> str:
    lines = [
        f"| {row['overrides'][-1].split('=')[-1]} | {row['compile_seconds']:.0f} |\n"
        for row in rows
        if "compile_seconds" in row
    ]
    return "| layers | seconds to compile |\n|---|---|\n" + "".join(lines)


GROUPS = {"large": large, "weak scaling": scaling, "depth": depth}
