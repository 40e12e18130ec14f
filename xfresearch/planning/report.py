"""Formats a plan as text."""

from xfresearch.planning.chips import GIB
from xfresearch.runtime.tables import count

PEAK = 0.995  # the estimate does not distinguish a larger utilisation from the chip's peak


def text(plan: dict) -> str:
    """The tables that the command prints."""
    parts = [_head(plan), _memory(plan["memory"]) if "memory" in plan else _checked(plan)]
    if "flops" in plan:
        parts += [_work(plan), _collectives(plan["collectives"]), _time(plan), _estimate(plan)]
    return "\n\n".join(parts)


def search_text(found: dict) -> str:
    """The plans of a search, best first, then the best plan in full."""
    parts = [f"{len(found['tried'])} plans fit by the formula; the best of them:", _ranked(found["tried"][:8])]
    if found["compiled"]:
        parts += ["compiled:", _ranked(found["compiled"])]
    parts.append(
        f"the best:\n\n{text(found['best'])}" if found["best"] else "NOTHING FITS: use more devices or a smaller batch"
    )
    return "\n\n".join(parts)


def _ranked(rows: list[dict]) -> str:
    cells = [("mesh", "remat", "batch", "memory", "step s", "utilisation, not overlapped", "overlapped")]
    for row in rows:
        mesh = ", ".join(f"{axis}={size}" for axis, size in row["mesh"].items()) or "one device"
        times: tuple[str, ...] = ("does not fit", "", "")
        if row["utilisation"]:
            times = (f"{row['step_seconds'][0]:.3g}", *bounds(row["utilisation"]))
        cells.append((mesh, row["remat"], str(row["batch"]), percent(row["memory"]), *times))
    return table(cells)


def _head(plan: dict) -> str:
    topology = plan["topology"]
    batch = plan["batch"]
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan["mesh"].items() if size > 1) or "one device"
    how = {
        "compiled": f"compiled in {plan.get('compile_seconds', 0):.0f} s",
        "formula": "formula, not compiled",
        "checked": "shapes and shardings resolve and the step lowers for TPU; not compiled",
    }[plan["method"]]
    machine = f"{topology['name']}: {topology['chips']} chips, {topology['devices']} devices, " if topology else ""
    active = plan["active_parameters"]
    used = f", {count(active)} of them active" if active != plan["parameters"] else ""
    return (
        f"{count(plan['parameters'])} parameters{used}, {plan['dtype']}, remat={plan['remat']}\n"
        f"{machine}mesh {mesh} ({how})\n"
        f"batch: {batch['sequences']} sequences of {batch['sequence_length']} tokens = {count(batch['tokens'])} tokens"
        + (f" in {batch['accumulate']} microbatches" if batch["accumulate"] > 1 else "")
    )


def _checked(plan: dict) -> str:
    rows = [("memory per device", "GiB"), *((name, gib(size)) for name, size in plan["parts"].items())]
    largest = [("largest arrays of the state", "global shape", "GiB per device")]
    largest += [(name, shape, gib(size)) for name, shape, size in plan["largest"]]
    return f"{table(rows)}\n\n{table(largest)}"


def _memory(memory: dict) -> str:
    rows = [("memory per device", "GiB", "share")]
    rows += [(name, gib(size), percent(size / memory["available"])) for name, size in memory["parts"].items()]
    rows += [("total", gib(memory["total"]), percent(memory["total"] / memory["available"]))]
    rows += [("available", gib(memory["available"]), "")]
    lines = [table(rows)]
    if not memory["fits"]:
        over = memory["total"] - memory["available"]
        lines.append(f"DOES NOT FIT: {gib(over)} GiB more than the device has")
        for title, largest in memory["largest"].items():
            if largest:
                rows = [(name, shape, gib(size)) for name, shape, size in largest]
                lines.append(table([(f"largest arrays: {title}", "global shape", "GiB per device"), *rows]))
        lines.append("what to try:\n" + "\n".join(f"  {line}" for line in memory["advice"]))
    return "\n\n".join(lines)


def _work(plan: dict) -> str:
    model = plan["model_flops"]
    rows = [
        ("FLOPs of a step, all devices", "FLOPs", "ratio to closed form"),
        ("closed form, 3 x forward", count(model, "G"), ""),
    ]
    names = {"traced": "traced, with recomputation", "compiled": "compiled, matrix products"}
    rows += [(names[name], count(value, "G"), f"{value / model:.3f}") for name, value in plan["flops"].items()]
    unknown = plan.get("unknown_kernels")
    lines = [table(rows)]
    if unknown:
        lines.append(f"kernels of unknown cost, counted as 0: {', '.join(unknown)}")
    if plan.get("loops_of_unknown_turns"):
        loops = ", ".join(plan["loops_of_unknown_turns"])
        lines.append(f"loops whose trip count depends on the data, counted once: {loops}")
    return "\n\n".join(lines) + f"\n\nbytes moved to and from HBM, per device: {count(plan['bytes_moved'], 'G')}B"


def _collectives(each_kind: list[dict]) -> str:
    if not each_kind:
        return "no collectives"
    rows = [("collective", "mesh axes", "count", "GB", "GB sent", "ms", "share")]
    for row in each_kind:
        kind = row["kind"] + (" (async)" if row["asynchronous"] else "")
        cells = [kind, " ".join(row["axes"]), f"{row['count']:.0f}"]
        cells += [f"{row['bytes'] / 1e9:.3g}", f"{row['sent'] / 1e9:.3g}"]
        cells += [f"{row['seconds'] * 1e3:.3g}", percent(row["share"])]
        rows.append(tuple(cells))
    return table(rows)


def _time(plan: dict) -> str:
    time = plan["time"]
    serial, overlapped = plan["step_seconds"]
    rows = [("seconds of a step", "alone", "of the step")]
    for name in ("arithmetic", "memory", "links", "network"):
        rows.append((name, f"{time[name]:.4g}", percent(time[name] / serial)))
    rows.append(("overlapped (the slowest)", f"{overlapped:.4g}", percent(overlapped / serial)))
    rows.append(("not overlapped", f"{serial:.4g}", ""))
    return table(rows) + f"\n\nbottleneck if everything overlaps: {time['limit']}"


def _estimate(plan: dict) -> str:
    expected = plan["expected"]

    def row(title: str, name: str, form) -> tuple[str, ...]:
        cells = [form(value) for value in plan[name]]
        return title, *cells, *([form(expected[name])] if expected else [])

    chips, budget = plan["topology"]["chips"], count(plan["budget_tokens"])
    rows = [("estimate", "not overlapped", "overlapped", *(["expected"] if expected else []))]
    rows.append(row("step", "step_seconds", lambda t: f"{t:.4g} s"))
    rows.append(row("tokens per second", "tokens_per_second", count))
    rows.append(row("per chip", "tokens_per_second", lambda rate: count(rate / chips)))
    measured = [percent(expected["utilisation"])] if expected else []
    rows.append(("model-FLOPs utilisation", *bounds(plan["utilisation"]), *measured))
    rows.append(row(f"hours to {budget} tokens", "hours", lambda h: f"{h:,.1f}"))
    rows.append(row(f"chip-hours to {budget} tokens", "chip_hours", lambda h: f"{h:,.0f}"))
    return f"{table(rows)}\n\n{_source(expected)}"


def _source(expected: dict | None) -> str:
    if expected is None:
        return "expected: not measured, as no update of a model like this one was timed on this chip in this dtype"
    return f"expected: as {expected['model']} ({expected['settings']}) on {expected['source']}"


def table(rows: list[tuple]) -> str:
    """An aligned table: the first column and columns of words to the left, columns with numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = [i == 0 or not any(row[i][:1].isdigit() for row in rows[1:]) for i in range(len(widths))]
    lines = [
        "  ".join(
            cell.ljust(width) if left[i] else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def gib(value: float) -> str:
    return f"{value / GIB:.2f}" if value >= 0.01 * GIB or not value else f"{value / GIB:.1g}"


def percent(value: float) -> str:
    """'12.3 %', or 'all'."""
    text = f"{100 * value:.1f} %"
    return "all" if text == "100.0 %" else text


def bounds(utilisation: tuple[float, float]) -> list[str]:
    """The utilisation without overlap, and the bound that full overlap gives. No program reaches the chip's peak."""
    forms = ("{}", "at most {}")
    return [
        form.format(percent(value)) if value < PEAK else "below the peak"
        for form, value in zip(forms, utilisation, strict=True)
    ]
