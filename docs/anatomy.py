"""Draws the pictures of docs/anatomy.md: python -m docs.anatomy [--stories FILE]

Memories and lens of the model in runs/quickstart on its held-out text; with --stories also of stories260K.bin (llama2.c), on
stories that it writes. docs/data/anatomy.json gets the figures, the seconds, the machine and the commit.
"""

import json
import time
from pathlib import Path

import numpy as np

from xfresearch.runtime.command import Parser, run
from xfresearch.runtime.errors import UserError

HERE = Path(__file__).parent
RUN = Path("runs/quickstart")
STORIES, LENGTH = 256, 192  # rows and tokens of the stories
ROWS = {"memories": 256, "lens": 32}
KEYS, TRIGGERS = 9, 2  # in the picture of memories


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m docs.anatomy", description=__doc__)
    parser.add_argument("--stories", default="", metavar="FILE", help="stories260K.bin")
    options = parser.parse_args(arguments)
    if not (RUN / "checkpoints").exists():
        raise UserError(f"{RUN} has no model: `make train` makes it")
    import xfresearch as xf
    from xfresearch.runtime.hardware import environment

    models = {"quickstart": (xf.load(RUN), None)}
    if options.stories:
        lm = xf.load(options.stories)
        models["stories260K"] = (lm, stories(lm))
    (HERE / "anatomy").mkdir(exist_ok=True)
    kept = HERE / "data" / "anatomy.json"
    written = json.loads(kept.read_text()) if kept.exists() else {}
    for name, (lm, tokens_NL) in models.items():
        written[name] = measured(name, lm, tokens_NL) | environment()
        kept.write_text(json.dumps(written, indent=1) + "\n")


def stories(lm) -> np.ndarray:
    """[rows, LENGTH] token ids of sampled stories, each from the start of a text."""
    texts = lm.generate([""] * STORIES, max_new_tokens=LENGTH + 8, temperature=1.0, top_p=1.0, seed=list(range(STORIES)))
    rows = [np.asarray(lm.tokens(text))[0, :LENGTH] for text in texts]
    return np.stack([row for row in rows if len(row) == LENGTH])


def measured(name: str, lm, tokens_NL) -> dict:
    """{analysis: {seconds, about, summary}}, and the pictures in docs/anatomy/."""
    from xfresearch import analysis

    collected = {}
    for kind in ("memories", "lens"):
        began = time.perf_counter()
        data = None if tokens_NL is None else tokens_NL[: ROWS[kind]]
        result = getattr(analysis, kind)(lm, data, count=ROWS[kind])
        seconds = round(time.perf_counter() - began, 1)
        collected[kind] = {"seconds": seconds, "about": result.about, "summary": result.summary}
        if kind == "memories":
            draw_memories(lm, result, HERE / "anatomy" / f"{name}_memories.png")
        else:
            (HERE / "anatomy" / f"{name}_lens.svg").write_bytes(result.drawings()[0])
    return collected


def draw_memories(lm, result, path: Path) -> None:
    """Shares by layer, and the keys of one layer: two triggers and the most likely tokens of the value."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = result.data
    numbers = [n for n, memory in enumerate(data["memories"]) if memory.endswith(".feed_forward")]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.6), width_ratios=(1, 2.6))
    for name, label, style in (
        ("shared", "triggers with the same last token", "o-"),
        ("shared_random", "the same of random tokens", "o--"),
        ("composed", "prediction is that of no active value", "s-"),
    ):
        left.plot(range(len(numbers)), data[name][numbers], style, label=label, color="C0" if "shared" in name else "C1")
    left.set(xlabel="layer", ylabel="share", ylim=(0, 1), xticks=range(len(numbers)))
    left.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    middle = numbers[len(numbers) // 2]
    table = next(each for each in result.tables if each.title == f"Keys of {data['memories'][middle]}")
    right.axis("off")
    title = "key, two of its triggers (the last token in ><), likeliest tokens of the value"
    right.set_title(f"layer {len(numbers) // 2}: {title}", fontsize=9)
    for number, (key, triggers, words) in enumerate(table.rows[:KEYS]):
        y = 1 - (number + 0.7) / KEYS
        shown = " | ".join(each[-26:] for each in triggers.split(" | ")[:TRIGGERS]).replace("\n", "\\n").replace("$", r"\$")
        right.text(0, y, key, fontsize=8, family="monospace", transform=right.transAxes)
        right.text(0.06, y, shown, fontsize=8, family="monospace", transform=right.transAxes)
        right.text(0.66, y, words.replace("$", r"\$"), fontsize=8, family="monospace", color="C3", transform=right.transAxes)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    run(main)
