"""python -m docs.surgery [--only WORD,...] [--json FILE]
python -m docs.surgery --billion
python -m docs.surgery --decode

Applies every conversion (xfresearch/surgery/) to every named config at :tiny, with random parameters, and records its
certificate or its refusal. docs/surgery.md has the table. A pair is skipped if the output file has it from the same code of
xfresearch/surgery/, so an interrupted run continues.

--billion converts a model of a billion parameters with merge_query_key, and records seconds and the peak of memory.
--decode records the speed of decoding before and after conversions, on models of 100 million random parameters.
"""

import hashlib
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from xfresearch.runtime.command import Parser, run

HERE = Path(__file__).parent
SEED = 0


def configs() -> list[str]:
    """The --config arguments of the named configs that have a tiny size."""
    files = sorted(path for path in Path("configs").glob("*.py") if "def get_config" in path.read_text())
    return [f"configs/{file.name}:tiny" for file in files if ":tiny" in file.read_text()]


def rough_model(name: str, overrides: list[str] = ()):
    """A language model with the config `name`, whose gains, biases and scales are all random."""
    from xfresearch.data.labels import open_data_set, trains_on_labels
    from xfresearch.data.tokenizers import tokenizer_for
    from xfresearch.loading.language_model import LanguageModel
    from xfresearch.models import transformer
    from xfresearch.run.config_files import parse
    from xfresearch.run.resolving import with_vocabulary

    config = parse(["--config", name, *overrides])
    labelled = trains_on_labels(config.data)
    tokenizer = None if labelled else tokenizer_for(config.data)
    source = open_data_set(config.data.corpus[0], config.sequence_length) if labelled else tokenizer
    config = with_vocabulary(config, source.vocab_size)
    params = transformer.init(config.model, jax.random.key(SEED))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(SEED + 1), len(leaves))
    for index, key in enumerate(keys):  # one at a time: the model may be large
        leaf = leaves[index]
        scale = 0.1 if leaf.size < 2**20 else leaf.std()
        leaves[index] = leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)
    return LanguageModel(config.model, structure.unflatten(leaves), tokenizer, config)


def cases() -> dict[str, Callable]:
    """{title: (conversion, its options) of a model}: every conversion with its defaults, and some with options."""
    from xfresearch.surgery import CONVERSIONS

    def fixed(name: str, **options) -> Callable:
        return lambda lm: (name, options)

    by_name = {name: fixed(name) for name in CONVERSIONS if name != "widen"}  # it has no default
    for name, option, value in (
        ("absorb_value_output", "gauge", "balanced"),
        ("fold_norm,centre", "width", "less_one"),
        ("feed_forward_to_memory", "form", "softmax"),
    ):
        by_name[f"{name} --{option} {value}"] = fixed(name, **{option: value})
    for option in ("heads", "hidden", "slots"):
        by_name[f"widen --{option}"] = lambda lm, option=option: ("widen", {option: 2 * sizes(lm)[option] or 1})
    return dict(sorted(by_name.items()))


def sizes(lm) -> dict[str, int]:
    """The numbers of heads, hidden units and slots of the first block, 0 without."""
    block = next(iter(lm.config.blocks.values()))
    sublayers = block.sublayers.values()
    return {name: max(getattr(each, name, 0) for each in sublayers) for name in ("heads", "hidden", "slots")}


def outcome(lm, name: str, options: dict) -> dict:
    """The certificate of a conversion in short, or the reason of the refusal."""
    from xfresearch import surgery

    try:
        _, result = surgery.convert(lm, surgery.chain(name, options=options))
    except surgery.Refused as refused:
        return {"refused": str(refused).removeprefix(f"{name}: ")}
    return {
        "relative": result.relative,
        "control": min(result.controls.values()),
        "gradient": result.gradient,
        "approximate": result.approximate,
        "condition": max(result.figures.values(), default=None),
    }


def code() -> str:
    """A digest of the code of the conversions."""
    files = sorted((HERE.parent / "xfresearch" / "surgery").glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def measure(output: str, only: list[str]) -> None:
    """Writes the outcome of every pair to `output`, after each one."""
    from tqdm import tqdm

    from xfresearch.runtime.files import write_rows
    from xfresearch.runtime.hardware import environment

    path = Path(output)
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    converted = cases()
    pairs = [(config, title) for config in configs() for title in converted]
    pairs = [pair for pair in pairs if not only or any(word in " ".join(pair) for word in only)]
    version = code()
    models: dict = {}
    with tqdm(pairs, unit="pair", disable=None) as bar:
        for config, title in bar:
            bar.set_postfix_str(f"{title} {config}")
            old = rows.get(config, {})
            outcomes = old.get("outcomes", {}) if old.get("code") == version else {}
            if title not in outcomes:
                if config not in models:
                    jax.clear_caches()  # hundreds of programs would fill the memory
                    models = {config: rough_model(config)}
                outcomes |= {title: outcome(models[config], *converted[title](models[config]))}
                rows[config] = {"code": version, "outcomes": outcomes} | environment()
                write_rows(output, rows)


def billion(output: str) -> None:
    """Writes the seconds and the peak of memory of merge_query_key on a GPT-2 with a billion parameters."""
    from xfresearch import surgery
    from xfresearch.run.closed_form import costs
    from xfresearch.runtime.files import write_json
    from xfresearch.runtime.hardware import environment

    sizes = {"width": 2048, "depth": 20, "max_length": 128, "blocks.main.attention.heads": 16}
    sizes |= {"blocks.main.feed_forward.hidden": 8192}
    lm = rough_model("configs/gpt2.py:tiny", [f"--config.model.{key}={value}" for key, value in sizes.items()])
    memory = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]
    begin = time.perf_counter()
    new, certificate = surgery.merge_query_key(lm)
    collected = {
        "seconds": time.perf_counter() - begin,
        "parameters": [costs(each.config, 128).parameters for each in (lm, new)],
        "bytes": [sum(leaf.nbytes for leaf in jax.tree.leaves(each.params)) for each in (lm, new)],
        "peak_bytes": [*memory, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024],
    }
    write_json(output, collected | {"certificate": certificate.as_dict()} | environment())
    print(certificate)


WIDE = {"width": 1024, "depth": 8, "max_length": 128}
ATTENTION = "blocks.main.attention."
LLAMA = {f"{ATTENTION}heads": 16, "blocks.main.norm": "none", "blocks.main.layout": "no_skip"}
MODELS = {  # {model: (config, options of the model, chains of conversions)}
    "16 heads, without skips and norms": (
        "configs/llama.py:tiny",
        WIDE | LLAMA,
        ("drop_query,drop_output", "drop_key,drop_output"),
    ),
    "1 head": (
        "configs/gpt2.py:tiny",
        WIDE | {f"{ATTENTION}heads": 1},
        ("merge_query_key", "absorb_value_output", "merge_query_key,absorb_value_output"),
    ),
    "16 heads": ("configs/gpt2.py:tiny", WIDE | {f"{ATTENTION}heads": 16}, ("merge_query_key", "absorb_value_output")),
}


def decode(output: str) -> None:
    """Writes tokens per second and cache bytes per token of models before and after conversions. A model is skipped if the
    output has it from the same commit."""
    from xfresearch.runtime.files import write_json
    from xfresearch.runtime.hardware import environment

    path, here = Path(output), environment()
    old = json.loads(path.read_text()) if path.exists() else {}
    rows = old["models"] if old.get("commit") == here["commit"] else {}
    for title, (config, options, chains) in MODELS.items():
        if title in rows:
            continue
        lm = rough_model(config, [f"--config.model.{key}={value}" for key, value in options.items()])
        attention = lm.params["blocks"]["main"]["attention"]
        for name in ("query", "key"):  # a matrix of random numbers alone may have no exact inverse
            kernel = attention[name]["kernel"]
            eye = np.eye(lm.config.width, dtype="float32").reshape(kernel.shape[1:])
            attention[name]["kernel"] = kernel + 3 * eye
        rows[title] = decoded(lm, chains)
        write_json(output, {"models": rows} | here)


def decoded(lm, chains: tuple[str, ...]) -> list[dict]:
    """The rows of `bench decode` for a model and its conversions, which have no certificates here: only speed counts."""
    from xfresearch import bench
    from xfresearch.loading.language_model import LanguageModel
    from xfresearch.surgery import chain
    from xfresearch.surgery.network import assemble, take_apart

    with tempfile.TemporaryDirectory() as directory:
        lm.save(f"{directory}/before")
        for names in chains:
            network = take_apart(lm.config, lm.params)
            for step in chain(names):
                network = step.conversion(network)
            model, params = assemble(network, "float32")
            LanguageModel(model, params, lm.tokenizer, lm.run).save(f"{directory}/{names}")
        workdirs = [f"{directory}/{name}" for name in ("before", *chains)]
        bench.main(["decode", *workdirs, "--json", f"{directory}/rows.json"])
        rows = json.loads(Path(directory, "rows.json").read_text())["rows"]
    return [row | {"model": Path(row["model"]).name} for row in rows]


def table(rows: dict) -> str:
    """The outcomes in Markdown: for each conversion, the configs with the same verdict in one row."""
    text = ""
    for name in cases():
        collected: dict[str, dict] = {}
        for config, row in rows.items():
            outcome = row["outcomes"][name]
            short = config.split("/")[1].removesuffix(".py:tiny")
            collected.setdefault(_verdict(outcome), {})[short] = outcome
        names = {verdict: ", ".join(f"`{each}`" for each in of) for verdict, of in collected.items()}
        lines = "".join(f"| {names[verdict]} | {_cell(verdict, of)} |\n" for verdict, of in collected.items())
        text += f"### {name}\n\n| configs | outcome |\n|---|---|\n{lines}\n"
    return text.rstrip() + "\n"


def _verdict(outcome: dict) -> str:
    if "refused" in outcome:
        return "refused: " + outcome["refused"].replace("|", "\\|")
    return "approximate" if outcome["approximate"] else "exact"


def _cell(verdict: str, outcomes: dict) -> str:
    """The verdict, with the largest difference of the models and the smallest of their controls."""
    if verdict.startswith("refused"):
        return verdict
    largest = max(outcome["relative"] for outcome in outcomes.values())
    control = min(outcome["control"] for outcome in outcomes.values())
    return f"{verdict}: at most {largest:.0e}, controls at least {control:.0e}"


def main(arguments) -> None:
    parser = Parser(prog="python -m docs.surgery", description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="parts of names to select")
    parser.add_argument("--json", default=str(HERE / "data" / "surgery.json"), metavar="FILE", help="output")
    parser.add_argument("--billion", action="store_true", help="measure a model of a billion parameters instead")
    parser.add_argument("--decode", action="store_true", help="measure decoding instead")
    options = parser.parse_args(arguments)
    if options.decode:
        decode(str(HERE / "data" / "surgery_decode.json"))
        return
    if options.billion:
        billion(str(HERE / "data" / "surgery_billion.json"))
        return
    measure(options.json, options.only)


if __name__ == "__main__":
    run(main)
