"""python -m docs.surgery billion|decode: what conversions cost and buy, for docs/data/tables/converted.md.

billion converts a model of a billion parameters with merge_query_key, and records seconds and the peak of memory.
decode records the speed of decoding before and after conversions, on models of 100 million random parameters.
"""

import json
import resource
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from xfresearch.runtime.command import Parser, run

HERE = Path(__file__).parent
SEED = 0


def rough_model(name: str, overrides: list[str] = ()):
    """A language model with the config `name`, whose gains, biases and scales are all random."""
    from xfresearch.data.labels import open_data_set, trains_on_labels
    from xfresearch.data.tokenizers import tokenizer_for
    from xfresearch.loading.language_model import LanguageModel
    from xfresearch.models import transformer
    from xfresearch.run_config.config_files import parse
    from xfresearch.run_config.resolving import with_vocabulary

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


def billion(output: str) -> None:
    """Writes the seconds and the peak of memory of merge_query_key on a GPT-2 with a billion parameters."""
    from xfresearch import surgery
    from xfresearch.run_config.closed_form import costs
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


MEASUREMENTS = {"billion": billion, "decode": decode}


def main(arguments) -> None:
    parser = Parser(prog="python -m docs.surgery", description=__doc__)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    name = parser.parse_args(arguments).measurement
    MEASUREMENTS[name](str(HERE / "data" / f"surgery_{name}.json"))


if __name__ == "__main__":
    run(main)
