"""How fast a Hugging Face folder becomes a model here: a random Llama against the floors under it."""

import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from xfresearch.interop import folder as folders
from xfresearch.interop import importing
from xfresearch.interop.config import read_model
from xfresearch.interop.families import family
from xfresearch.interop.places import places
from xfresearch.interop.tensor_files import Outgoing
from xfresearch.models import transformer
from xfresearch.trees import path_name

HEAD = 128


def llama(width: int, layers: int, vocab: int) -> dict:
    """config.json of a Llama with four heads of queries to one of keys and values, and its own matrix of outputs."""
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(width // HEAD, 1),
        "num_key_value_heads": max(width // HEAD // 4, 1),
        "max_position_embeddings": 2048,
    }


def write_random(folder: Path, config: dict, dtype: str, shard_bytes: int = 5 * 10**9) -> None:
    """Writes a folder of random weights, each tensor's drawn by its name."""
    kind = family(config["model_type"])
    model = read_model(kind, config)
    shapes = {
        path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(transformer.abstract(model))
    }

    def outgoing(place) -> Outgoing:
        def make():
            random = np.random.default_rng(zlib.crc32(place.name.encode()))
            return (random.standard_normal(place.shape, np.float32) * np.float32(0.02)).astype(dtype)

        return Outgoing(place.name, place.shape, dtype, make)

    folder.mkdir(parents=True)
    folders.write_tensors(folder, map(outgoing, places(kind, model, shapes)), shard_bytes)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=2) + "\n")


def measure(folder: Path, rounds: int) -> list[dict]:
    """Import and the floors under it, which take turns: seconds of the fastest round, MB/s of the folder's tensors.

    The floors are reading the tensors' bytes and nothing else, and filling fresh memory with as many float32.
    """
    stored = folders.stored_tensors(folder).values()
    size = sum(tensor.bytes for tensor in stored)
    functions = {
        "import": lambda: jax.block_until_ready(importing.load(folder).params),
        "read": lambda: [tensor.read().shape for tensor in stored],
        "fill": lambda: [np.full(tensor.shape, 1, np.float32).shape for tensor in stored],
    }
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_seconds(function))
    return [{"what": name, "seconds": min(each), "MB/s": size / min(each) / 1e6} for name, each in times.items()]


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
