"""Reading a random Llama from a Hugging Face folder into parameters, compared with only reading the bytes, and with only
filling as much memory."""

import json
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from xfresearch.benchmarks.flags import add_json, add_sizes, write_figures
from xfresearch.benchmarks.rounds import in_rounds, print_table, seconds_of

HEAD_SIZE = 128


def add_flags(parser) -> None:
    add_sizes(parser, {"width": 1024, "layers": 8, "vocab": 128_256, "rounds": 5})
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="of the files")
    add_json(parser)


def run(a) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "llama"
        write_random(folder, llama(a.width, a.layers, a.vocab), a.dtype)
        rows = measure(folder, a.rounds)
    print_table({"": "{what}", "seconds": "{seconds:.2f}", "MB/s": "{MB/s:.0f}"}, rows)
    write_figures(a, {"rows": rows})


def llama(width: int, layers: int, vocab: int) -> dict:
    """config.json of a Llama with four query heads per key-value head and an untied head."""
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(width // HEAD_SIZE, 1),
        "num_key_value_heads": max(width // HEAD_SIZE // 4, 1),
        "max_position_embeddings": 2048,
    }


def write_random(folder: Path, config: dict, dtype: str, shard_bytes: int = 5 * 10**9) -> None:
    """Writes a folder of random weights; each tensor's seed is its name."""
    import jax
    import numpy as np

    from xfresearch.interop import folder as folders
    from xfresearch.interop.config_json import read_model
    from xfresearch.interop.families import get_family
    from xfresearch.interop.mapping import mappings
    from xfresearch.interop.tensor_files import PendingTensor
    from xfresearch.models import transformer
    from xfresearch.runtime.trees import path_name

    family = get_family(config["model_type"])
    model = read_model(family, config)
    shapes = {
        path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(transformer.abstract(model))
    }

    def pending(mapping):
        def make():
            random = np.random.default_rng(zlib.crc32(mapping.name.encode()))
            return (random.standard_normal(mapping.shape, np.float32) * np.float32(0.02)).astype(dtype)

        return PendingTensor(mapping.name, mapping.shape, dtype, make)

    folder.mkdir(parents=True)
    folders.write_tensors(folder, map(pending, mappings(family, model, shapes)), shard_bytes)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=2) + "\n")


def measure(folder: Path, rounds: int) -> list[dict]:
    """Times import and its two lower bounds in turn: seconds of the fastest round, MB/s of the folder's tensors.

    The lower bounds are reading the tensors' bytes, and filling new memory with as many float32 values.
    """
    import numpy as np

    from xfresearch.interop import importing
    from xfresearch.interop.folder import stored_tensors

    stored = stored_tensors(folder).values()
    size = sum(tensor.bytes for tensor in stored)
    functions: dict[str, Callable] = {
        "import": lambda: importing.load(folder).params,
        "read": lambda: [tensor.read().shape for tensor in stored],
        "fill": lambda: [np.full(tensor.shape, 1, np.float32).shape for tensor in stored],
    }
    times = in_rounds({name: partial(seconds_of, function) for name, function in functions.items()}, rounds)
    return [{"what": name, "seconds": min(each), "MB/s": size / min(each) / 1e6} for name, each in times.items()]
