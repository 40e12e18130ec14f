"""Writes the generated parts of the documentation: python -m docs.write. tests/test_docs.py checks that they are current."""

import json
from dataclasses import replace
from pathlib import Path

from xfresearch.command import run
from xfresearch.config.describing import describe
from xfresearch.errors import UserError

HERE = Path(__file__).parent
MARK = "## Every key\n\n"
TABLE = "## The table\n\n"
PLANS = "## The plans\n\n"


def configuration() -> str:
    """docs/configuration.md with its table of keys as the code has it now."""
    return (HERE / "configuration.md").read_text().split(MARK)[0] + MARK + describe()


def variants() -> str:
    """docs/variants.md with its table as the configs and docs/data/variants.json have it now."""
    results = HERE / "data" / "variants.json"
    if not results.exists():
        raise UserError(
            f"{results} is missing: python -m docs.comparison"
        )
    rows = json.loads(results.read_text())["rows"]
    about = (
        f"Trained on {_all(rows, 'date')} at commit {_all(rows, 'commit')} on {_all(rows, 'machine', 'cpu')}, "
        f"{_all(rows, 'machine', 'cores')} cores, jax {_all(rows, 'versions', 'jax')}; mean and standard deviation of "
        "validation bits per byte over 3 seeds. Speed is tokens per second in training over those of `gpt2`, both taking "
        "turns.\n\n"
    )
    titles = [
        "config",
        "what it is",
        "parameters",
        "FLOPs per token",
        "cache bytes per token",
        "bits per byte",
        "speed",
    ]
    head = "| " + " | ".join([*titles, "source"]) + " |\n"
    lines = "".join(_row(name, row) for name, row in rows.items())
    return (HERE / "variants.md").read_text().split(TABLE)[0] + TABLE + about + head + "|---" * 8 + "|\n" + lines


def _all(rows: dict, *path: str) -> str:
    """What every row says at `path`; several values where they differ."""
    found = []
    for row in rows.values():
        for name in path:
            row = row[name]
        found.append(str(row)[:12] if path == ("commit",) else str(row))
    return ", ".join(sorted(set(found)))


def _row(name: str, row: dict) -> str:
    from configs.variants import VARIANTS
    from xfresearch.config.files import parse
    from xfresearch.models.closed_form import costs
    from xfresearch.statistics import summary

    file, _, argument = name.partition(":")
    config = parse(["--config", name])
    counted = costs(replace(config.model, vocab_size=257), config.sequence_length)
    if argument in VARIANTS:
        what, source = VARIANTS[argument][:2]
    else:
        what, source = _first_line(Path(file))
    mean, spread = summary(row["bits_per_byte"])
    sizes = (
        f"{counted.parameters / 1e6:.2f} M | {counted.flops_per_token / 1e6:.2f} M | {counted.cache_bytes_per_token:,}"
    )
    label = name.removeprefix("configs/")
    return f"| `{label}` | {what} | {sizes} | {mean:.3f} ± {spread:.3f} | {row['relative_speed']:.2f} | {source} |\n"


def _first_line(file: Path) -> tuple[str, str]:
    """What a config's docstring says it is, and the source in its parentheses."""
    text = " ".join(file.read_text().split('"""')[1].split("\n\n")[0].split())
    inside = text[text.index("(") + 1 : text.index(")")] if "(" in text else "-"
    return text.rstrip(".").replace(f" ({inside})", "").replace("|", "or"), inside


def scale() -> str:
    """docs/scale.md with its tables as docs/data/scale.json has them."""
    from docs.scale import tables

    rows = json.loads((HERE / "data" / "scale.json").read_text())["rows"]
    return (HERE / "scale.md").read_text().split(PLANS)[0] + PLANS + tables(rows)


PAGES = {"configuration.md": configuration, "variants.md": variants, "scale.md": scale}


def main(arguments) -> None:
    for page, current in PAGES.items():
        (HERE / page).write_text(current())


if __name__ == "__main__":
    run(main)
