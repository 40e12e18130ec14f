"""Models of llama2.c (Karpathy 2023, github.com/karpathy/llama2.c): the .bin files that run.c reads, as float32.

legacy      7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (negative: head untied), seq_len; then the
            tensors in the order of LEGACY, two tables of rotations among them, which run.c does not read either
version 1   "ak42", int32 1, the 7 int32, a byte that is 1 where the head is tied, zeros up to byte 256; tensors as VERSION_1

A matrix is [outputs, inputs] and layers are stacked. Queries and keys are rotated by neighbours, (2i, 2i + 1), where ours
are by halves, (i, i + K/2): their dimensions are put in that order. The tokenizer lies beside: tok<vocab_size>.bin.
"""

import math
import struct
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from xfresearch.config.resolving import resolve
from xfresearch.config.run import Config, DataConfig
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.errors import UserError
from xfresearch.interop.places import pairs
from xfresearch.language_model import LanguageModel, layout_of, with_dtype
from xfresearch.models.block_config import BLOCKS
from xfresearch.models.feed_forwards.dense import GatedConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.model_config import ModelConfig
from xfresearch.trees import path_name

MAGIC, VERSION_1_BYTES = b"24ka", 256
EMBED, FINAL_NORM, HEAD = "embed/table", "final_norm/gain", "head/table"
ATTENTION_NORM, FEED_FORWARD_NORM = "blocks/main/attention_norm_in/gain", "blocks/main/feed_forward_norm_in/gain"
ATTENTION = [f"blocks/main/attention/{name}/kernel" for name in ("query", "key", "value", "output")]
FEED_FORWARD = [f"blocks/main/feed_forward/{name}/kernel" for name in ("gate", "down", "up")]  # w1, w2, w3
LEGACY = [EMBED, ATTENTION_NORM, *ATTENTION, FEED_FORWARD_NORM, *FEED_FORWARD, FINAL_NORM, "cos", "sin", HEAD]
VERSION_1 = [ATTENTION_NORM, FEED_FORWARD_NORM, FINAL_NORM, EMBED, *ATTENTION, *FEED_FORWARD, HEAD]


class Header(NamedTuple):
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int


class Layout(NamedTuple):
    """Where a file has what: its tensors in order, the first at byte `start`."""

    header: Header
    tied: bool
    start: int
    shapes: dict[str, tuple[int, ...]]


def load(path, mesh=None, dtype: str = "") -> LanguageModel:
    """The model in a .bin file and the tokenizer beside it, on the first device or cut over a `mesh`; computing in
    float32, or in the `dtype` given.

    UserError where the file is not of the size that its header asks for, or is no llama2.c model at all.
    """
    path = Path(path).expanduser()
    layout = read_layout(path)
    tokenizer_file = _tokenizer_file(path, layout.header)
    tokenizer = load_tokenizer(tokenizer_file)
    if tokenizer.vocab_size != layout.header.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens; the model {path} has {layout.header.vocab_size}"
        raise UserError(f"{tokenizer_file}: holds {sizes}")
    run = _run(layout, tokenizer_file)
    return LanguageModel(with_dtype(run.model, dtype), _params(path, layout, run.model, mesh), tokenizer, run)


def read_layout(path: Path) -> Layout:
    """What the header says, checked against itself and the file's size."""
    if not path.is_file():
        raise UserError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    with path.open("rb") as file:
        head = file.read(VERSION_1_BYTES)
    if head[:2] == b"PK" or (head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")):
        raise UserError(f"{path}: a PyTorch checkpoint; xfresearch never opens pickle: convert it to safetensors")
    layout = _layout(path, head)
    size, needed = path.stat().st_size, layout.start + 4 * sum(map(math.prod, layout.shapes.values()))
    if size != needed:
        says = ", ".join(f"{name}={value}" for name, value in layout.header._asdict().items())
        raise UserError(f"{path}: holds {size} bytes; a llama2.c model with {says} has {needed}")
    return layout


def _layout(path: Path, head: bytes) -> Layout:
    version_1 = head[:4] == MAGIC
    if len(head) < (VERSION_1_BYTES if version_1 else 28):
        raise UserError(f"{path}: {len(head)} bytes are no llama2.c model: its header is cut off")
    if version_1:
        version, *sizes, tied = struct.unpack_from("<8iB", head, 4)
        if version != 1:
            raise UserError(
                f"{path}: version {version} of llama2.c's files is not read: it must be 1 (float32), or legacy"
            )
        header, start, order = Header(*sizes), VERSION_1_BYTES, VERSION_1
    else:
        header, start, order = Header(*struct.unpack_from("<7i", head)), 28, LEGACY
        tied, header = header.vocab_size > 0, header._replace(vocab_size=abs(header.vocab_size))
    _check(path, header)
    shapes = _shapes(header)
    return Layout(header, bool(tied), start, {name: shapes[name] for name in order if name != HEAD or not tied})


def _check(path: Path, h: Header) -> None:
    for name, value in h._asdict().items():
        low = 2 if name == "seq_len" else 1
        if value < low:
            raise UserError(f"{path}: not a llama2.c model: {name}={value} must be at least {low}")
    if h.dim % (2 * h.n_heads):
        raise UserError(f"{path}: not a llama2.c model: dim={h.dim} must be an even multiple of n_heads={h.n_heads}")
    if h.n_heads % h.n_kv_heads:
        raise UserError(
            f"{path}: not a llama2.c model: n_heads={h.n_heads} must be a multiple of n_kv_heads={h.n_kv_heads}"
        )


def _shapes(h: Header) -> dict[str, tuple[int, ...]]:
    """Shapes as they lie in the file, by the names of our parameters."""
    D, F, N = h.dim, h.hidden_dim, h.n_layers
    K = D // h.n_heads
    rotations, heads, kv_heads = (h.seq_len, K // 2), h.n_heads * K, h.n_kv_heads * K
    attention = [(N, heads, D), (N, kv_heads, D), (N, kv_heads, D), (N, D, heads)]
    return {
        **{EMBED: (h.vocab_size, D), HEAD: (h.vocab_size, D), "cos": rotations, "sin": rotations},
        **{ATTENTION_NORM: (N, D), FEED_FORWARD_NORM: (N, D), FINAL_NORM: (D,)},
        **dict(zip(ATTENTION, attention, strict=True)),
        **dict(zip(FEED_FORWARD, [(N, F, D), (N, D, F), (N, F, D)], strict=True)),
    }


def _tokenizer_file(path: Path, h: Header) -> Path:
    names = (f"tok{h.vocab_size}.bin", "tokenizer.bin")
    found = [path.with_name(name) for name in names if path.with_name(name).is_file()]
    if not found:
        raise UserError(f"{path}: no tokenizer beside it: neither {names[0]} nor {names[1]} is there")
    return found[0]


def _run(layout: Layout, tokenizer_file: Path) -> Config:
    h = layout.header
    block = BLOCKS["pre_norm"](
        norm="rms",
        norm_cast="before_gain",
        attention=SoftmaxConfig(heads=h.n_heads, kv_heads=h.n_kv_heads, position="rope"),
        feed_forward=GatedConfig(kind="swiglu", hidden=h.hidden_dim),
    )
    model = ModelConfig(
        width=h.dim,
        depth=h.n_layers,
        vocab_size=h.vocab_size,
        blocks={"main": block},
        final_norm="rms",
        tie_embeddings=layout.tied,
    )
    return resolve(Config(sequence_length=h.seq_len, model=model, data=DataConfig(tokenizer=str(tokenizer_file))))


def _params(path: Path, layout: Layout, model: ModelConfig, mesh) -> dict:
    """The parameters, one after the other from the file to where they lie."""
    numbers, places, start = np.memmap(path, "<f4", "r", layout.start), {}, 0
    for name, shape in layout.shapes.items():
        places[name], start = numbers[start : start + math.prod(shape)].reshape(shape), start + math.prod(shape)

    def read(path, leaf):
        name = path_name(path)
        return jax.device_put(_ours(name, places[name], leaf.shape), leaf.sharding)

    return jax.tree_util.tree_map_with_path(read, layout_of(model, mesh))


def _ours(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of the file as the parameter `name` of `shape`."""
    if not name.endswith("/kernel"):
        return np.array(array)
    kernel = array.swapaxes(1, 2).reshape(shape)
    if name not in ATTENTION[:2]:
        return np.ascontiguousarray(kernel)
    return np.ascontiguousarray(kernel[..., pairs(shape[-1], shape[-1])])
