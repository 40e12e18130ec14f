"""Writes the generated parts of the documentation: python -m docs.write. tests/test_docs.py checks that they are current."""

import json
from dataclasses import replace
from pathlib import Path

from xfresearch.config_io import describe

HERE = Path(__file__).parent
MARK = "## Every key\n\n"
TABLE = "## The table\n\n"


def configuration() -> str:
    """docs/configuration.md with its table of keys as the code has it now."""
    return (HERE / "configuration.md").read_text().split(MARK)[0] + MARK + describe()


def variants() -> str:
    """docs/variants.md with its table as the configs and docs/variants.json have it now."""
    results = json.loads((HERE / "variants.json").read_text())
    machine = results["machine"]
    about = (
        f"Trained on {results['date']} at commit {results['commit'][:12]} on {machine['cpu']}, {machine['cores']} cores, "
        f"jax {results['versions']['jax']}; {results['seeds']} seeds, mean and standard deviation of validation bits per "
        "byte. Speed is tokens per second in training over those of `gpt2`, both taking turns.\n\n"
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
    rows = "".join(_row(name, row) for name, row in results["rows"].items())
    return (HERE / "variants.md").read_text().split(TABLE)[0] + TABLE + about + head + "|---" * 8 + "|\n" + rows


def _row(name: str, row: dict) -> str:
    from configs.variants import VARIANTS
    from xfresearch.comparison import summary
    from xfresearch.config_io import parse
    from xfresearch.models.costs import costs

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


PAGES = {"configuration.md": configuration, "variants.md": variants}


if __name__ == "__main__":
    for page, current in PAGES.items():
        (HERE / page).write_text(current())
