"""Writes the generated parts of the documentation: python -m docs.write. tests/test_docs.py checks them."""

import json
import re
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

from docs import kernel_tables, option_table, studies
from docs import performance as measured
from xfresearch.data.column_formats import FORMATS
from xfresearch.models.layouts import LAYOUTS
from xfresearch.runtime.command import run

HERE = Path(__file__).parent
TABLE = "# Every variant\n\nEach is a `--config`; [models](../../models.md#kinds-and-options) says how to use it.\n\n"
PLANS = "## The plans\n\n"
SHARED = """## Runs that studies share

A config is trained once, so studies may have the same runs. Their differences are then not independent. In the first row one
run is high: it has 1.820, and the others 1.788 to 1.798. Where these runs are the baseline, every arm looks better by 0.005.
In the two studies of activations they are an arm, which looks worse.

"""
PAIRS = """## What pairs are worth

The two runs of a pair share a seed, so their difference may vary less than that of two runs with different seeds. In the
studies of text here it hardly does: with a correlation of 0.2, the deviation of a difference is a tenth smaller.

"""
MACHINES = """## The same run on two machines

Some studies have runs of several machines. These are all configs that two of them have trained, on the GPU with jax 0.11.2
and `JAX_DEFAULT_MATMUL_PRECISION=highest`. Differences are in bits per byte, of the second machine minus the first. The
study is that of the GPU's run; `norms` and `single_heads` are those from before the ladder. A run at too high a learning
rate differs most. No run was repeated on an Intel Xeon and an AMD EPYC.

"""
CONVERTED_TITLE = "# The conversions\n\nHow they are called: [surgery](../../surgery.md).\n\n"
DECODING_TITLE = """## What an exact conversion buys

Decoding one sequence reads every parameter once per token, so a model with fewer parameters is faster. In a model without
skips and norms, W_O and one of W_Q and W_K go. With one head, W_Q W_K^T is as large as one of the two, and so is W_V W_O.
With 16 heads these products are 16 times as large: the pair is the cheaper form, and the product is one to analyse, not to
decode with. The ratio is the speed relative to the model before, the median over rounds that alternate between the models.

"""
MODELS_TITLE = "# Memories and lens of two trained models\n\nWhat they are: [analyses](../../anatomy.md#memories).\n\n"
FIGURES = {  # in docs/data/anatomy.json
    "triggers whose last token two others of their key have too": "shared",
    "the same for the last two tokens": "shared_2",
    "the same for the last word": "shared_word",
    "keys whose value predicts the token after the first trigger": "agreement",
    "positive coefficients": "active",
    "tokens at which the layer predicts a token that no active value predicts alone (published: 0.68)": "composed",
    "changes of the most likely token to a third one, which neither stream nor layer predict": "third of changes",
    "loss in nats": "loss",
}
MADE = re.compile(r"(<!-- made: ([\w.]+) -->).*?(<!-- end -->)", re.S)  # a part of a page between what people have written
PICTURE = "![{0}](layouts/{0}.svg)"
GOALS = "## On a GPU, beside the goals\n\n"


def _before(page: str, section: str) -> str:
    """The text of a page before its first generated section, which the title of the section finds."""
    return (HERE / page).read_text().partition(section.splitlines()[0] + "\n")[0]


def variants() -> str:
    """docs/data/tables/variants.md: all variants with their costs."""
    titles = ["config", "description", "parameters", "FLOPs per token", "cache bytes per token", "source"]
    lines = [" | ".join(titles), "|".join(["---"] * len(titles)), *map(_row, variant_names())]
    table = "".join(f"| {line} |\n" for line in lines)
    return TABLE + table


def data() -> str:
    """docs/data.md with its row of the files of columns that are read."""
    row = f"| {', '.join(each.words for each in FORMATS.values())} | column"
    return re.sub(r"^\| parquet.*? \| column", row, (HERE / "data.md").read_text(), flags=re.M)


def of_studies() -> str:
    """docs/data/tables/runs.md: runs that studies share, what pairs are worth, and how machines differ."""
    about = "# The runs of the studies\n\nThe studies are those of the [answers](../../index.md#answers).\n\n"
    return "".join((about, SHARED, studies.shared(), "\n", PAIRS, studies.pairs(), "\n", MACHINES, studies.machines()))


def variant_names() -> list[str]:
    """The --config arguments of all variants: the named configs at :3m, then those of configs/variants.py."""
    from xfresearch.configs.variants import VARIANTS

    others = [file for file in sorted(Path("configs").glob("*.py")) if file.stem not in ("common", "variants")]
    named = [f"configs/{file.name}:3m" for file in others if ":3m" in file.read_text()]
    return [*named, *(f"configs/variants.py:{name}" for name in ("base", *VARIANTS))]


def _row(name: str) -> str:
    from xfresearch.configs.variants import VARIANTS
    from xfresearch.run_config.closed_form import costs
    from xfresearch.run_config.config_files import parse

    file, _, argument = name.partition(":")
    config = parse(["--config", name])
    counted = costs(config, config.sequence_length)
    if argument in VARIANTS:
        description, source = VARIANTS[argument][:2]
    else:
        description, source = _description_and_source(Path(file))
    cells = [
        f"`{name.removeprefix('configs/')}`",
        description.replace("|", "\\|"),
        f"{counted.parameters / 1e6:.2f} M",
        f"{counted.flops_per_token / 1e6:.2f} M",
        f"{counted.cache_bytes_per_token:,}",
        source,
    ]
    return " | ".join(cells)


def _distinct(rows: dict, *path: str) -> str:
    """The value of all rows at `path`, or several values with commas where rows differ."""
    collected = []
    for row in rows.values():
        for name in path:
            row = row[name]
        collected.append(str(row)[:12] if path == ("commit",) else str(row))
    return ", ".join(sorted(set(collected)))


def _description_and_source(file: Path) -> tuple[str, str]:
    """The first paragraph of a config's docstring, and the source that it has in parentheses."""
    text = " ".join(file.read_text().split('"""')[1].split("\n\n")[0].split())
    inside = text[text.index("(") + 1 : text.index(")")] if "(" in text else "-"
    return text.rstrip(".").replace(f" ({inside})", ""), inside


def scale() -> str:
    """docs/plan.md with the tables of docs/data/scale.json."""
    from docs.scale import tables

    rows = json.loads((HERE / "data" / "scale.json").read_text())["rows"]
    return _before("plan.md", PLANS) + PLANS + tables(rows)


def every_plan() -> str:
    """docs/data/tables/plans.md: every named config on three machines."""
    from docs.scale import EVERY, TITLES, about, plans

    rows = json.loads((HERE / "data" / "scale.json").read_text())["rows"]
    listed = [row for row in rows.values() if row["group"] == EVERY]
    meaning = "What the columns mean: [named plans](../../plan.md#the-plans)."
    return f"# {TITLES[EVERY]}\n\n{about(listed)} {meaning}\n\n{plans(listed)}"


def converted() -> str:
    """docs/data/tables/converted.md: the list of conversions, and what they cost and buy."""
    from xfresearch.surgery import CONVERSIONS

    lines = "".join(_conversion(each) for each in CONVERSIONS.values())
    head = "| conversion | what it does | exact if | options |\n|---|---|---|---|\n"
    return f"{CONVERTED_TITLE}{head}{lines}\n{_cost_of_a_billion()}\n{_decoding()}"


def _cost_of_a_billion() -> str:
    """The section about a large model, of docs/data/surgery_billion.json."""
    written = json.loads((HERE / "data" / "surgery_billion.json").read_text())
    first, last = (f"{count / 1e9:.2f} B" for count in written["parameters"])
    before, after = (f"{size / 1e9:.1f} GB" for size in written["bytes"])
    loaded, peak = (f"{size / 1e9:.1f} GB" for size in written["peak_bytes"])
    text = (
        f"`python -m docs.surgery billion` {_where(written)}: `merge_query_key` on a GPT-2 with {first} parameters "
        f"({before}) makes one with {last} ({after}), with its certificate, in {written['seconds'] / 60:.1f} minutes. The "
        f"peak of memory was {loaded} until the model was loaded, and {peak} in all. Layers are converted and compared one "
        "at a time, and the result is held beside the original. The logits differ by "
        f"{written['certificate']['relative']:.0e} relative in float64."
    )
    return f"## A billion parameters\n\n{textwrap.fill(text, 125)}\n"


def _decoding() -> str:
    """What conversions do to decoding, of docs/data/surgery_decode.json."""
    written = json.loads((HERE / "data" / "surgery_decode.json").read_text())
    text = "| model | conversion | tokens/s | ratio | parameters | cache bytes per token |\n|---|---|---|---|---|---|\n"
    for model, rows in written["models"].items():
        for row in rows:
            name = "-" if row["model"] == "before" else f"`{row['model']}`"
            text += f"| {model} | {name} | {row['tokens/s']:.1f} | {row['ratio']:.2f} | {row['parameters']:,} "
            text += f"| {row['cache bytes per token']:,} |\n"
    return f"{DECODING_TITLE}`python -m docs.surgery decode` {_where(written)}.\n\n{text}"


def _where(environment: dict) -> str:
    return f"on {environment['date']} at commit {environment['commit'][:12]} on {environment['machine']['cpu']}"


def _conversion(conversion) -> str:
    options = ", ".join(f"`{name}`: {option.doc}{_listed(option.allowed)}" for name, option in conversion.options.items())
    return f"| `{conversion.name}` | {conversion.about} | {conversion.conditions} | {options or '-'} |\n"


def _listed(allowed: tuple) -> str:
    return f" ({', '.join(f'`{value}`' for value in allowed)})" if allowed else ""


def memories() -> str:
    """docs/data/tables/memories.md: the pictures and figures of docs/data/anatomy.json."""
    return f"{MODELS_TITLE}{_memories_and_lens()}"


def _memories_and_lens() -> str:
    """The pictures and figures of docs.anatomy."""
    written = json.loads((HERE / "data" / "anatomy.json").read_text())
    text = ""
    for name, row in written.items():
        seconds = " and ".join(f"{row[kind]['seconds']:.0f} s" for kind in ("memories", "lens"))
        about = f"{name}: {row['memories']['about']}. Lens and loss are of {row['lens']['about'].rpartition('; ')[2]}."
        about += f" Memories and lens took {seconds}, {_where(row)} (`python -m docs.anatomy`)."
        text += textwrap.fill(about, 125) + f"\n\n![Memories of {name}](../../anatomy/{name}_memories.png)\n\n"
        text += f"![Most likely next token after each layer of {name}](../../anatomy/{name}_lens.svg)\n\n"
    columns = {name: row["memories"]["summary"] | row["lens"]["summary"] for name, row in written.items()}
    lines = [f"| figure | {' | '.join(columns)} |\n", "|---" * (len(columns) + 1) + "|\n"]
    for label, figure in FIGURES.items():
        lines.append(f"| {label} | " + " | ".join(_figure(values, figure) for values in columns.values()) + " |\n")
    return text + "".join(lines)


def _figure(values: dict, figure: str) -> str:
    """A figure with the half width of its interval, or with the one by chance."""
    if figure == "third of changes":
        return f"{values['third'][0] / values['changes'][0]:.3f}"
    value, half = values[figure]
    chance = values.get(f"{figure}_random")
    return f"{value:.3f}, {chance[0]:.3f} by chance" if chance else f"{value:.3f} +- {half:.3f}"


def edits() -> str:
    """docs/data/tables/edits.md: the models, the trace and the scores of the edits of docs/data/facts.json."""
    from docs.facts_page import alone, models, sites, together

    result, about = _facts()
    about += (
        ". Scores are in percent, with 95 % bootstrap intervals: S is the harmonic mean of efficacy, paraphrase and\n"
        "neighbourhood ([metrics](../../editing.md#what-is-measured)), and `said` is the share of requests after whose\n"
        "prompt the model generates the new object. [What they mean](../../questions/where_is_a_fact.md)."
    )
    traced = f"## The models\n\n{models(result)}\n## The trace\n\n{sites(result)}"
    tables = f"{traced}\n## One edit at a time\n\n{alone(result)}\n## Many edits in one model\n\n{together(result)}"
    return f"# Edits of three models that know facts\n\n{about}\n\n{tables}"


def _facts() -> tuple[dict, str]:
    """What docs/facts.py measured, and how."""
    written = json.loads((HERE / "data" / "facts.json").read_text())
    last = [item for of in written.values() for item in of.values() if isinstance(item, dict)][-1]
    return written, f"`python -m docs.facts`, the last row {_where(last)}"


def models() -> str:
    """docs/models.md with the tables of what the code says of layouts, norms, positions and kinds."""
    from xfresearch.models.catalogue import TABLES

    return _made("models.md", {option: _named(option) for option in TABLES} | {"drawings": _drawings()})


def anatomy() -> str:
    """docs/anatomy.md with the table of analyses."""
    from xfresearch.analysis.registry import ANALYSES

    lines = [f"| `{name}` | {each.about} |\n" for name, each in ANALYSES.items()]
    return _made("anatomy.md", {"analyses": "".join(["| analysis | what it shows |\n|---|---|\n", *lines])})


def _made(page: str, parts: dict[str, str]) -> str:
    """A page with its made parts as they are now."""
    return MADE.sub(lambda part: f"{part[1]}\n\n{parts[part[2]]}\n{part[3]}", (HERE / page).read_text())


def _named(option: str) -> str:
    """A table of the values of an option that have names."""
    from xfresearch.models.catalogue import TABLES

    cells = [[f"`{option}`", "formula", "paper"], ["---"] * 3]
    cells += [[f"`{name}`", each.formula.replace("|", "\\|"), each.paper] for name, each in TABLES[option].items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _drawings(columns: int = 3) -> str:
    """The drawings of all layouts, each under its name."""
    names = [*LAYOUTS] + [""] * (-len(LAYOUTS) % columns)
    rows = [names[at : at + columns] for at in range(0, len(names), columns)]
    titles, pictures = ([[name and text.format(name) for name in row] for row in rows] for text in ("`{0}`", PICTURE))
    lines = [line for pair in zip(titles, pictures, strict=True) for line in pair]
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], ["---"] * columns, *lines[1:]])


def layout_drawing(layout: str) -> str:
    """The drawing of a layout, without the options of its sublayers."""
    from xfresearch.models.block_config import BLOCKS
    from xfresearch.pages.colours import as_file
    from xfresearch.pages.drawing import draw_block

    block = BLOCKS[layout]()
    if layout == "all_attention":  # it is the layout whose attention has the memory
        block = replace(block, attention=replace(block.attention, memory_slots=1))
    return as_file(draw_block(block, words=False))


def question(page: str) -> str:
    """A page of docs/questions with the results of its studies."""
    text = _before(f"questions/{page}.md", studies.MEASURED)
    return text + studies.MEASURED + studies.measured(page, text)


def performance() -> str:
    """docs/performance.md with the figures of GPUs."""
    return _before("performance.md", GOALS) + GOALS + measured.tables()


PAGES = {
    "anatomy.md": anatomy,
    "data.md": data,
    "models.md": models,
    "performance.md": performance,
    "plan.md": scale,
}
# Tables that pages link to, and that are too long to be read with them.
PAGES |= {"data/tables/keys.md": option_table.page, "data/tables/variants.md": variants}
PAGES |= {"data/tables/memories.md": memories, "data/tables/plans.md": every_plan}
PAGES |= {"data/tables/edits.md": edits, "data/tables/runs.md": of_studies}
PAGES |= {"data/tables/measurements.md": measured.measurements, "data/tables/flags.md": kernel_tables.flags}
PAGES |= {"data/tables/kernels.md": kernel_tables.defaults, "data/tables/converted.md": converted}
PAGES |= {f"questions/{page}.md": partial(question, page) for page in studies.ANSWERS}
PAGES |= {"questions/answers.svg": studies.answers}
PAGES |= {f"questions/{name}.svg": partial(studies.picture, name) for name in studies.pictures()}
PAGES |= {f"layouts/{name}.svg": partial(layout_drawing, name) for name in LAYOUTS}


def main(arguments) -> None:
    for page, current in PAGES.items():
        (HERE / page).parent.mkdir(exist_ok=True, parents=True)
        (HERE / page).write_text(current())


if __name__ == "__main__":
    run(main)
