"""Reads models of llama2.c (Karpathy 2023, github.com/karpathy/llama2.c): the float32 .bin files that run.c reads.

legacy      7 int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size (negative: untied head), seq_len;
            then the tensors in the order of LEGACY, including two RoPE tables, which run.c does not read either
version 1   "ak42", int32 1, the 7 int32, a byte that is 1 if the head is tied, zeros up to byte 256;
            then the tensors in the order of VERSION_1

Matrices are [outputs, inputs] and layers are stacked. RoPE rotates the pairs (2i, 2i + 1) of queries and keys, where
ours rotates (i, i + K/2), so import reorders their dimensions. The tokenizer is in the same directory:
tok<vocab_size>.bin.
"""

import math
import struct
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from xfresearch.config.options import DataConfig
from xfresearch.data.tokenizers import load_tokenizer
from xfresearch.data.tokenizers.llama2c import Llama2cTokenizer
from xfresearch.interop.importing import Imported
from xfresearch.interop.mapping import rope_order
from xfresearch.models.block_config import BLOCKS
from xfresearch.models.feed_forwards.dense import GatedConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.model_config import ModelConfig, with_dtype
from xfresearch.models.transformer import abstract_params
from xfresearch.run.config import Config
from xfresearch.run.resolving import resolve
from xfresearch.runtime.errors import UserError
from xfresearch.runtime.formats import refused, sniff
from xfresearch.runtime.trees import path_name

MAGIC = b"24ka"
LEGACY_BYTES = 28  # of the header
VERSION_1_BYTES = 256
TOKENIZER_BYTES = 64 << 20  # a larger file is no tokenizer, and is not read to find out
EMBED = "embed/table"
FINAL_NORM = "final_norm/gain"
HEAD = "head/table"
ATTENTION_NORM = "blocks/main/attention_norm_in/gain"
FEED_FORWARD_NORM = "blocks/main/feed_forward_norm_in/gain"
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
    """The layout of a file: the shapes of its tensors in order. The first tensor is at byte `start`."""

    header: Header
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
    tokenizer = load_tokenizer(run.data.tokenizer)
    if tokenizer.vocab_size != layout.header.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens; the model {path} has {layout.header.vocab_size}"
        raise UserError(f"{run.data.tokenizer}: has {sizes}")
    model = with_dtype(run.model, dtype)
    return Imported(model, read_params(path, layout, abstract_params(model, mesh)), tokenizer, run)


def read_header(path: Path) -> tuple[Layout, Config]:
    """The layout of a .bin file, and its model with the tokenizer's path as the config of a run."""
    layout = read_layout(path)
    return layout, _run(layout, _tokenizer_file(path, layout.header))


def read_layout(path: Path) -> Layout:
    """The layout that the header gives, checked for consistency and against the file's size."""
    if not path.is_file():
        raise UserError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    found = sniff(path)
    if found.kind not in ("llama2.c", "tokens", "binary", "text"):
        raise refused(path, found, "it must be a model of llama2.c")
    with path.open("rb") as file:
        head = file.read(VERSION_1_BYTES)
    try:
        layout = _layout(path, head)
    except UserError:
        if _is_tokenizer(path):
            raise UserError(f"{path}: a llama2.c tokenizer: it must be a model") from None
        raise
    size = path.stat().st_size
    expected = layout.start + 4 * sum(map(math.prod, layout.shapes.values()))
    if size != expected:
        fields = ", ".join(f"{name}={value}" for name, value in layout.header._asdict().items())
        raise UserError(f"{path}: has {size} bytes; a llama2.c model with {fields} must have {expected}")
    return layout


def _is_tokenizer(path: Path) -> bool:
    if path.stat().st_size > TOKENIZER_BYTES:
        return False
    try:
        Llama2cTokenizer(path.read_bytes())
    except UserError:
        return False
    return True


def _layout(path: Path, head: bytes) -> Layout:
    version_1 = head[:4] == MAGIC
    if len(head) < (VERSION_1_BYTES if version_1 else LEGACY_BYTES):
        raise UserError(f"{path}: not a llama2.c model: its header is truncated at {len(head)} bytes")
    if version_1:
        version, *sizes, tied = struct.unpack_from("<8iB", head, 4)
        if version != 1:
            raise UserError(
                f"{path}: version {version} of llama2.c's files is not supported: it must be 1 (float32) or legacy"
            )
        header = Header(*sizes)
        start = VERSION_1_BYTES
        order = VERSION_1
    else:
        header = Header(*struct.unpack_from("<7i", head))
        start = LEGACY_BYTES
        order = LEGACY
        tied = header.vocab_size > 0
        header = header._replace(vocab_size=abs(header.vocab_size))
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
    """The shapes of the file's tensors, by our parameter names."""
    D, F, N = h.dim, h.hidden_dim, h.n_layers
    K = D // h.n_heads
    rotations = (h.seq_len, K // 2)
    heads = h.n_heads * K
    kv_heads = h.n_kv_heads * K
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
        raise UserError(f"{path}: tokenizer not found: neither {names[0]} nor {names[1]} is in its directory")
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


def read_params(path: Path, layout: Layout, abstract: dict) -> dict:
    """The parameters, copied one by one from the file to their devices, with the shardings of `abstract`."""
    numbers = np.memmap(path, "<f4", "r", layout.start)
    tensors = {}
    start = 0
    for name, shape in layout.shapes.items():
        size = math.prod(shape)
        tensors[name] = numbers[start : start + size].reshape(shape)
        start += size

    def read(path, leaf):
        name = path_name(path)
        return jax.device_put(_parameter(name, tensors[name], leaf.shape).astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(read, abstract)


def _parameter(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Converts a tensor of the file to the parameter `name` with `shape`."""
    if not name.endswith("/kernel"):
        return np.array(array)
    kernel = array.swapaxes(1, 2).reshape(shape)
    if name not in ATTENTION[:2]:
        return np.ascontiguousarray(kernel)
    return np.ascontiguousarray(kernel[..., rope_order(shape[-1], shape[-1])])
