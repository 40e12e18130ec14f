"""python -m docs.studies [--only NAME,...] [--config.key=value ...]

Runs what is missing of the studies that docs/questions answers, each in docs/data/studies/NAME, where git keeps the
design, the results of the runs and the report. A run that several studies have is trained once.
"""

import json
import math
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import mean, median, quantiles

from xfresearch.configs.studies import common
from xfresearch.pages.colours import as_file
from xfresearch.pages.intervals import Interval, intervals
from xfresearch.runtime.command import Parser, run
from xfresearch.runtime.errors import UserError, nearest
from xfresearch.studies import preregistration, report
from xfresearch.studies.measurement import RUNS_FILE
from xfresearch.studies.report_tables import UNITS, all_sizes, in_markdown
from xfresearch.study import RESULTS
from xfresearch.study import main as study_main

DATA = Path("docs/data/studies")
BEFORE = Path("docs/data/machines.json")  # runs trained again elsewhere: {processor: {study: {fingerprint: bits per byte}}}
MEASURED = "## What was measured\n\n"
# In this order. The first ones have the arms that others share.
STUDIES = {
    "w_o": "w_o.py",
    "w_o_pre_norm": "w_o.py:pre_norm",
    "w_o_small": "w_o.py:small",
    "w_o_small_pre_norm": "w_o.py:small_pre_norm",
    "null": "null.py",
    "w_o_layouts": "w_o.py:layouts",
    "w_q": "w_q.py",
    "w_q_small": "w_q.py:small",
    "memory": "memory.py",
    "memory_beside": "memory.py:beside",
    "norms": "norms.py",
    "norms_small": "norms.py:small",
    "activations": "activations.py",
    "activations_tuned": "activations.py:tuned",
    "experts": "experts.py",
    "recent": "recent.py",
    "recent_differential": "recent.py:differential",
    "lambda_layers": "lambda_layers.py",
    "lambda_recall": "lambda_layers.py:recall",
    "single_heads": "single_heads.py",
    "norms_alpha": "norms.py:alpha",
    "norms_majority": "norms.py:majority",
    "w_q_adamw": "w_q.py:adamw",
    "w_q_merged": "w_q.py:merged",
    "w_q_one_head": "w_q.py:one_head",
    "experts_parameters": "experts.py:parameters",
    "experts_slots": "experts.py:slots",
    "cross_attention": "cross_attention.py:sort",
    "cross_attention_text": "cross_attention.py",
    "base_recipe": "base_recipe.py",
    "base_recipe_survivors": "base_recipe.py:survivors",
}

SHAZEER = {  # nats per token of T5 base after 524,288 updates (2020, table 1)
    **{"geglu": 1.633, "swiglu": 1.636, "reglu": 1.645, "bilinear": 1.648},
    **{"glu": 1.663, "relu": 1.677, "gelu": 1.679, "swish": 1.683},
}
# Studies whose data are generated, so that paths of texts are refused.
GENERATED = ("norms_majority", "lambda_recall", "cross_attention")

ANSWERS = {  # page of docs/questions: its studies
    "w_o": ("w_o", "w_o_pre_norm", "w_o_small", "w_o_small_pre_norm", "w_o_layouts"),
    "w_q": ("w_q", "w_q_small", "w_q_adamw", "w_q_merged", "w_q_one_head"),
    "single_heads": ("single_heads",),
    "norms": ("norms", "norms_small", "norms_alpha", "norms_majority"),
    "memory": ("memory", "memory_beside"),
    "activations": ("activations", "activations_tuned"),
    "experts": ("experts", "experts_parameters", "experts_slots"),
    "lambda_layers": ("lambda_layers", "lambda_recall"),
    "recent": ("recent", "recent_differential"),
    "cross_attention": ("cross_attention_text", "cross_attention"),
    "base_recipe": ("base_recipe", "base_recipe_survivors"),
}

HEADLINES = {  # of the README: what was changed: study, arm, and the size if it is not all of them
    "W_O W_1 as one matrix, no norm or skip between": ("w_o_small_pre_norm", "fused_output", "small-x4"),
    "identity for W_Q, RoPE": ("w_q", "identity", ""),
    "16 layers of one head": ("single_heads", "thin", ""),
    "RMSNorm": ("norms", "rms", ""),
    "DyT, alpha of 0.125 at first": ("norms", "dyt", ""),
    "memory slots": ("memory", "all_attention", ""),
    "SwiGLU": ("activations_tuned", "swiglu", ""),
    "GELU": ("activations_tuned", "gelu", ""),
    "top-2 of 8 experts, equal FLOPs": ("experts", "experts", ""),
    "top-2 of 8 experts, equal parameters": ("experts_parameters", "experts", ""),
    "lambda layers, no window, 512 tokens": ("lambda_layers", "lambda_global", "length_512"),
    "output gate": ("recent", "output_gate", ""),
    "learned sink": ("recent", "learned_sink", ""),
    "differential attention, +7 % FLOPs": ("recent_differential", "two_heads", ""),
}
# Baselines of these studies in words. Each is what a reader would use without the change, not a control of one study.
BASELINES = {
    **{"pre_norm": "pre-norm", "learned": "learned W_Q", "wide": "4 layers of 4 heads", "layer": "LayerNorm"},
    **{"feed_forward": "feed-forward layers", "relu": "ReLU", "dense": "a dense layer", "attention": "attention"},
    "softmax": "softmax attention",
}
HEADLINE_AXIS = "bits per byte more than the model after \"vs.\" has: less is better. Lines are 95 % intervals"


def measured(page: str, before: str) -> str:
    """The results of the studies of a page that have ended, and the command that runs them again.

    `before` is the text above them: a picture that it shows is not shown twice.
    """
    listed, said, parts = [name for name in ANSWERS[page] if name in pictures()], set(), []
    for name in listed:
        rule, basis = _results(name)["study"]["rule"], _basis(name)
        parts.append(_measured(name, f"({name}.svg)" not in before, rule in said, "" if basis in said else basis))
        said |= {rule, basis}
    return "\n".join([*parts, _rerun(listed)]) if listed else "The study has not ended yet.\n"


def picture(name: str) -> str:
    """The differences that a study found, as an SVG file."""
    return as_file(report.picture(_results(name)))


def answers() -> str:
    """One or two differences of each page, as an SVG file: all sizes together, or the one that is named."""
    groups = {}
    for words, (name, arm, size) in HEADLINES.items():
        outcome = _results(name)
        actual = outcome["sizes"][size]["arms"][arm] if size else outcome["ladder"][arm]
        difference, verdict = actual["difference"], actual["verdict"] if size else _over_rungs(outcome, arm)
        label = f"{words} vs. {BASELINES[outcome['study']['baseline']]}"
        groups[label] = [Interval("", difference["mean"], difference["low"], difference["high"], verdict)]
    return as_file(intervals(f"Fourteen changes: {HEADLINE_AXIS}", groups, common.MARGIN, HEADLINE_AXIS))


def _over_rungs(outcome: dict, arm: str) -> str:
    """The verdict over the ladder; if there is none, the most frequent one of its rungs and how many have it."""
    verdict = outcome["ladder"][arm]["verdict"]
    each = [here["arms"][arm]["verdict"] for here in outcome["sizes"].values()]
    decided = Counter(word for word in each if word != "undecided")
    if verdict != "undecided" or not decided:
        return verdict
    ((most, number),) = decided.most_common(1)
    return f"{most} at {number} of {len(each)} rungs"


def pictures() -> list[str]:
    """The studies that have a picture."""
    return [name for names in ANSWERS.values() for name in names if (DATA / name / RESULTS).exists()]


def _results(name: str) -> dict:
    return json.loads((DATA / name / RESULTS).read_text())


def _basis(name: str) -> str:
    """What a study without a ledger rests on. '' for the others."""
    if (DATA / name / preregistration.LEDGER).exists():
        return ""
    at = ", ".join(f"`{size}`" for size in _results(name)["study"]["tune_at"])
    where = f"at {at} alone" if at else "at each size"
    return (
        "This study is from before the [ladder](../studies.md#what-is-computed) and the [ledger](../studies.md#the-ledger): "
        f"one number of tokens, AdamW, and learning rates tried {where}, with one run each. Its verdicts are t tests of "
        "pairs, corrected by Holm's method, and its intervals leave out the choice of the rate, which makes them narrower."
    )


def _measured(name: str, pictured: bool, ruled: bool, basis: str) -> str:
    """Picture, rule, basis and differences of a study. Its report has the rest. ruled: a study above has the same rule."""
    outcome = _results(name)
    about = f"[all figures](../data/studies/{name}/report.md), "
    about += f"[design](../../configs/studies/{STUDIES[name].partition(':')[0]}), [words](../studies.md#words)"
    parts = [f"### {name}", f"**{outcome['study']['question']}** ({about})"]
    parts += [f"![differences]({name}.svg)"] if pictured else []
    parts += ["The rule is the same." if ruled else f"Rule: {outcome['study']['rule']}"]
    parts += filter(None, (basis, _differences(outcome)))
    if name.startswith("activations"):
        parts.append(_shazeer(outcome))
    return "\n\n".join(parts) + "\n"


def _differences(outcome: dict) -> str:
    """A table of arms: verdict and difference over all sizes, then at each size."""
    study, columns = outcome["study"], {}
    if len(outcome["sizes"]) > 1 and outcome["ladder"]:
        columns[all_sizes(outcome)] = outcome["ladder"]
    columns |= {name: here["arms"] for name, here in outcome["sizes"].items()}
    rows = []
    for arm in study["arms"]:
        if arm != study["baseline"]:
            listed = [arms.get(arm, {}) for arms in columns.values()]
            rows.append((f"`{arm}`", listed[0].get("verdict", "no verdict"), *map(_with_interval, listed)))
    first = next(iter(columns))
    unit = f"{UNITS[study['metric']]} more than `{study['baseline']}` has: less is better; ± is half of the 95 % interval."
    return f"{unit.capitalize()}\n\n{in_markdown(('arm', f'verdict, {first}', *columns), rows)}"


def _with_interval(arm: dict) -> str:
    if not (each := arm.get("difference")):
        return "-"
    return f"{each['mean']:+.4f} ±{(each['high'] - each['low']) / 2:.4f}"


def _rerun(names: list[str]) -> str:
    """The command that runs studies again, with the runs and hours that they took."""
    each = [_results(name) for name in names]
    runs, hours = sum(of["runs"] for of in each), sum(of["seconds"] for of in each) / 3600
    made = [line.split(": ", 1)[1].split(", ", 2)[1:] for of in each for line in of["made"]["runs"]]
    dates, machines = sorted({date for date, _ in made}), sorted({machine for _, machine in made})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"""## Run it again

```text
python -m docs.studies --only {",".join(names)}
```

From nothing that is {runs} runs, less what studies share; they took {hours:.1f} hours of one process each, on {when}, on
{" and ".join(machines)}. Commits and versions are in the reports.
"""


def shared() -> str:
    """A table of the arms that have the same runs in several studies."""
    collected = {}  # (values, parameters): names of arms, with their size
    for name in (each for each in STUDIES if each in pictures()):
        for size, here in _results(name)["sizes"].items():
            for arm, each in here["arms"].items():
                key = (tuple(each["values"]), each["parameters"])
                collected.setdefault(key, {}).setdefault(f"{name}: {arm}", size)
    sizes = {}  # names of arms: sizes at which they have the same runs
    for arms in collected.values():
        if len(arms) > 1:
            sizes.setdefault(tuple(arms), []).append(", ".join(dict.fromkeys(arms.values())))
    rows = [[" and ".join(of), "; ".join(arms)] for arms, of in sorted(sizes.items(), key=lambda each: -len(each[0]))]
    return in_markdown(["at size", "the same runs"], rows) + "\n"


def machines() -> str:
    """A table of how much runs of one config differ in bits per byte between the processors that trained them."""
    trained = {}  # fingerprint: processor: (study, bits per byte)
    for processor, of_studies in json.loads(BEFORE.read_text()).items():
        for name, values in of_studies.items():
            for fingerprint, value in values.items():
                trained.setdefault(fingerprint, {})[processor] = (name, value)
    for name in pictures():
        for fingerprint, result in json.loads((DATA / name / RUNS_FILE).read_text())["runs"].items():
            value = result["evaluation"].get("bits_per_byte")
            if value is not None:
                trained.setdefault(fingerprint, {}).setdefault(_processor(result["made"]["machine"]), (name, value))
    collected = {}
    for each in trained.values():
        for first, second in combinations(sorted(each), 2):
            (name, before), (_, after) = each[first], each[second]
            collected.setdefault((name, first, second), []).append(after - before)
    rows = []
    for key, differences in sorted(collected.items()):
        sizes = [abs(each) for each in differences]
        figures = (f"{mean(differences):+.4f}", f"{median(sizes):.4f}", f"{max(sizes):.4f}")
        rows.append([*key, len(differences), *figures])
    columns = ["study", "trained on", "and on", "runs", "mean difference", "median, without sign", "largest"]
    return in_markdown(columns, rows) + "\n"


def pairs() -> str:
    """How much paired differences vary, and what pairing is worth, over the studies of text that have ended."""
    sizes = [size for name in pictures() if (result := _results(name))["study"]["metric"] == "bits_per_byte"
             for size in result["sizes"].values()]  # fmt: skip
    arms = [arm["difference"] for size in sizes for arm in size["arms"].values() if "difference" in arm]
    result = {json.dumps(each): each for each in arms}.values()  # studies may share runs
    rows = []
    for name, title in (("deviation", "deviation of differences, bits per byte"), ("correlation", "correlation of pairs")):
        tenths = quantiles([each[name] for each in result], n=10)
        rows.append([title, len(result), *(f"{tenths[at]:.3f}" for at in (0, 4, 8))])
    return in_markdown(["of arms at a size", "number", "10 % are below", "median", "10 % are above"], rows) + "\n"


def _processor(machine: dict) -> str:
    """'AMD EPYC', or '1 x NVIDIA H200'."""
    return machine["cpu"] if machine["backend"] == "cpu" else machine["devices"]


def _shazeer(outcome: dict) -> str:
    """The rank correlation of our means with his, by size, over the arms that have one."""
    from scipy import stats

    collected = []
    for size, here in outcome["sizes"].items():
        ours = [math.nan if here["arms"][name]["mean"] is None else here["arms"][name]["mean"] for name in SHAZEER]
        test = stats.spearmanr(ours, list(SHAZEER.values()), nan_policy="omit")
        collected.append(f"{test.statistic:.2f} (p = {test.pvalue:.2g}) at {size}")
    return f"Rank correlation with the order of Shazeer's eight activations: {', '.join(collected)}."


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m docs.studies", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"only some of {', '.join(STUDIES)}")
    options, overrides = parser.parse_known_args(arguments)
    chosen = options.only.split(",") if options.only else list(STUDIES)
    for name in chosen:
        if name not in STUDIES:
            raise UserError(f"--only={name} is not allowed: it must be one of {', '.join(STUDIES)}{nearest(name, STUDIES)}")
    for name in chosen:
        others = _others(name)
        reuse = ["--reuse", *others] if others else []
        print(f"\n{name}", flush=True)
        config = f"configs/studies/{STUDIES[name]}"
        given = _without_paths(overrides) if name in GENERATED else overrides
        study_main(["--config", config, "--workdir", str(DATA / name), *given, *reuse])


def _others(name: str) -> list[str]:
    """The directories of other studies whose runs a study may take: all, or once it has ended those that its ledger names.
    Another one would be a new version of the ledger, although nothing is missing."""
    folders = [file.parent for file in sorted(DATA.glob(f"*/{RUNS_FILE}"))]
    if (DATA / name / RESULTS).exists():
        own = [version for version in preregistration.read(DATA / name) if not version.get("of")]
        named = {folder for version in own for folder in version["seen"]["directories"]}
        folders = [folder for folder in folders if folder.name in named]
    return [str(folder) for folder in folders]


def _without_paths(overrides: list[str]) -> list[str]:
    """The overrides without --config.machine=VALUE or --config.machine VALUE."""
    bare = [at for at, each in enumerate(overrides) if each == "--config.machine"]
    left = set(bare) | {at + 1 for at in bare}
    return [each for at, each in enumerate(overrides) if at not in left and not each.startswith("--config.machine=")]


if __name__ == "__main__":
    run(main)
