"""Reads models of llama2.c (Karpathy 2023, github.com/karpathy/llama2.c): the float32 .bin files that run.c reads.

legacy      7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (negative: untied head), seq_len;
            then the tensors in the order of LEGACY, including two RoPE tables, which run.c does not read either
version 1   "ak42", int32 1, the 7 int32, a byte that is 1 if the head is tied, zeros up to byte 256;
            then the tensors in the order of VERSION_1

Matrices are [outputs, inputs] and layers are stacked. RoPE rotates the pairs (2i, 2i + 1) of queries and keys, where
ours rotates (i, i + K/2), so import reorders their dimensions. The tokenizer is tok<vocab_size>.bin in the same directory.
"""

import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.data.tokenizers.llama2c import Llama2cTokenizer
from xfresearch.interop.importing import Imported
from xfresearch.interop.mapping import rope_order
from xfresearch.models.block_config import BLOCKS
from xfresearch.models.feed_forwards.dense import GatedConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.model_config import ModelConfig, with_dtype
from xfresearch.models.transformer import abstract_params
from xfresearch.options.fields import with_values
from xfresearch.options.run_options import DataConfig
from xfresearch.run_config.config import Config
from xfresearch.run_config.resolving import resolve
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import inside, read_bytes
from xfresearch.runtime.formats import refused, sniff
from xfresearch.runtime.opening import open_to_read
from xfresearch.runtime.trees import path_name
from xfresearch.sharding.capacity import require_room_for

MAGIC = b"24ka"
HEADER = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
TOKENIZER_BYTES = 64 << 20  # a larger file is no tokenizer, and is not read to find out
EMBED, FINAL_NORM, HEAD = "embed/table", "final_norm/gain", "head/table"
NORMS = [f"blocks/main/{name}_norm_in/gain" for name in ("attention", "feed_forward")]
ATTENTION = [f"blocks/main/attention/{name}/kernel" for name in ("query", "key", "value", "output")]
FEED_FORWARD = [f"blocks/main/feed_forward/{name}/kernel" for name in ("gate", "down", "up")]  # w1, w2, w3
LEGACY = [EMBED, NORMS[0], *ATTENTION, NORMS[1], *FEED_FORWARD, FINAL_NORM, "cos", "sin", HEAD]
VERSION_1 = [*NORMS, FINAL_NORM, EMBED, *ATTENTION, *FEED_FORWARD, HEAD]


class Layout(NamedTuple):
    """The layout of a file: the numbers of its header, and the shapes of its tensors in order, from byte `start` on."""

    header: dict[str, int]
    tied: bool
    start: int
    shapes: dict[str, tuple[int, ...]]


def load(path, mesh=None, dtype: str = "") -> Imported:
    """The model in a .bin file with its tokenizer, on the first device or sharded over `mesh`.

    It computes in `dtype`, by default float32. Raises UserError if the file is not a llama2.c model, or does not have
    the size that its header requires.
    """
    path = Path(path).expanduser()
    layout, run = read_header(path)
    tokenizer, size = load_tokenizer(run.data.tokenizer), layout.header["vocab_size"]
    if tokenizer.vocab_size != size:
        raise UserError(f"{run.data.tokenizer}: has {tokenizer.vocab_size} tokens; the model {path} has {size}")
    model = with_dtype(run.model, dtype)
    return Imported(model, read_params(path, layout, abstract_params(model, mesh)), tokenizer, run)


def read_header(path: Path) -> tuple[Layout, Config]:
    """The layout of a .bin file, and its model with the tokenizer's path as the config of a run."""
    layout = read_layout(path)
    h = layout.header
    names = (f"tok{h['vocab_size']}.bin", "tokenizer.bin")
    tokenizer = next((str(inside(path.parent, name)) for name in names if os.path.lexists(path.with_name(name))), None)
    if tokenizer is None:
        raise UserError(f"{path}: tokenizer not found: neither {names[0]} nor {names[1]} is in its directory")
    attention = SoftmaxConfig(heads=h["n_heads"], kv_heads=h["n_kv_heads"], position="rope")
    gated = GatedConfig(kind="swiglu", hidden=h["hidden_dim"])
    block = BLOCKS["pre_norm"](norm="rms", norm_cast="before_gain")
    block = with_values(block, {"attention": attention, "feed_forward": gated})
    model = ModelConfig(
        width=h["dim"],
        depth=h["n_layers"],
        vocab_size=h["vocab_size"],
        blocks={"main": block},
        final_norm="rms",
        tie_embeddings=layout.tied,
    )
    return layout, resolve(Config(sequence_length=h["seq_len"], model=model, data=DataConfig(tokenizer=tokenizer)))


def read_layout(path: Path) -> Layout:
    """The layout that the header gives, checked for consistency and against the file's size."""
    if not path.is_file():
        raise UserError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    form = sniff(path)
    if form.kind not in ("llama2.c", "tokens", "binary", "text"):
        raise refused(path, form, "it must be a model of llama2.c")
    try:
        layout = _layout(path)
    except UserError:
        if _is_tokenizer(path):
            raise UserError(f"{path}: a llama2.c tokenizer: it must be a model") from None
        raise
    size, expected = path.stat().st_size, layout.start + 4 * sum(map(math.prod, layout.shapes.values()))
    if size != expected:
        fields = ", ".join(f"{name}={value}" for name, value in layout.header.items())
        raise UserError(f"{path}: has {size} bytes; a llama2.c model with {fields} must have {expected}")
    return layout


def _is_tokenizer(path: Path) -> bool:
    try:
        return path.stat().st_size <= TOKENIZER_BYTES and bool(Llama2cTokenizer(read_bytes(path)))
    except UserError:
        return False


def _layout(path: Path) -> Layout:
    with open_to_read(path) as file:
        head = file.read(256)
    is_legacy = head[:4] != MAGIC
    start, first, order = (28, 0, LEGACY) if is_legacy else (256, 8, VERSION_1)
    if len(head) < start:
        raise UserError(f"{path}: not a llama2.c model: its header is truncated at {len(head)} bytes")
    if not is_legacy and (version := struct.unpack_from("<i", head, 4)[0]) != 1:
        raise UserError(f"{path}: version {version} of llama2.c's files is not supported: it must be 1 (float32) or legacy")
    header = dict(zip(HEADER, struct.unpack_from("<7i", head, first), strict=True))
    tied = header["vocab_size"] > 0 if is_legacy else bool(head[36])
    header["vocab_size"] = abs(header["vocab_size"]) if is_legacy else header["vocab_size"]
    shapes = _shapes(path, **header)
    return Layout(header, tied, start, {name: shapes[name] for name in order if name != HEAD or not tied})


def _shapes(path: Path, **h: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's tensors, by our parameter names. Raises UserError for sizes that no model has."""
    wrong = [f"{name}={n} must be at least {low}" for name, n in h.items() if n < (low := 1 + (name == "seq_len"))]
    if not wrong and h["dim"] % (2 * h["n_heads"]):
        wrong = [f"dim={h['dim']} must be an even multiple of n_heads={h['n_heads']}"]
    if not wrong and h["n_heads"] % h["n_kv_heads"]:
        wrong = [f"n_heads={h['n_heads']} must be a multiple of n_kv_heads={h['n_kv_heads']}"]
    if wrong:
        raise UserError(f"{path}: not a llama2.c model: {wrong[0]}")
    D, F, N, K = h["dim"], h["hidden_dim"], h["n_layers"], h["dim"] // h["n_heads"]
    table, rotations, kv = (h["vocab_size"], D), (h["seq_len"], K // 2), (N, h["n_kv_heads"] * K, D)
    return {
        **dict.fromkeys((EMBED, HEAD), table) | dict.fromkeys(("cos", "sin"), rotations),
        **dict.fromkeys(NORMS, (N, D)) | {FINAL_NORM: (D,)},
        **dict(zip(ATTENTION, [(N, D, D), kv, kv, (N, D, D)], strict=True)),
        **dict(zip(FEED_FORWARD, [(N, F, D), (N, D, F), (N, F, D)], strict=True)),
    }


def read_params(path: Path, layout: Layout, abstract: dict) -> dict:
    """The parameters, copied one by one from the file to their devices, with the shardings of `abstract`."""
    require_room_for(abstract, path)
    ends = np.cumsum([math.prod(shape) for shape in layout.shapes.values()])
    with open_to_read(path) as file:
        parts = np.split(np.memmap(file, "<f4", "r", layout.start), ends[:-1])
    tensors = dict(zip(layout.shapes, parts, strict=True))

    def read(path, leaf):
        name = path_name(path)
        array = tensors[name].reshape(layout.shapes[name])
        if name.endswith("/kernel"):
            array = array.swapaxes(1, 2).reshape(leaf.shape)
        if name in ATTENTION[:2]:
            array = array[..., rope_order(leaf.shape[-1], leaf.shape[-1])]
        return jax.device_put(np.array(array, leaf.dtype, order="C"), leaf.sharding)

    return jax.tree_util.tree_map_with_path(read, abstract)
