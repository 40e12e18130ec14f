"""A Hugging Face folder on disk: config.json and safetensors, sharded or not. No other format is opened."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xfresearch.errors import UserError

DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder with a config.json of Hugging Face's, not of a run of ours."""
    file = path / "config.json"
    if not file.is_file():
        return False
    try:
        config = json.loads(file.read_text())
    except ValueError:
        return False
    return isinstance(config, dict) and ("model_type" in config or "architectures" in config)


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor in the folder's safetensors files, by name. UserError for a file that is missing or damaged."""
    found = {}
    for file in _files(folder):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict
                piece = tensors.get_slice(name)
                kind = str(piece.get_dtype())
                if kind not in DTYPES:
                    raise UserError(f"{file}: tensor {name} has dtype {kind}: it must be one of {', '.join(DTYPES)}")
                found[name] = Stored(file, tuple(piece.get_shape()), DTYPES[kind])
    return found


@contextmanager
def opened(file: Path) -> Iterator:
    """The file as `safetensors` reads it; UserError where it cannot."""
    import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16, in which such tensors are handed over
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: not a whole safetensors file ({reason})") from None


def _files(folder: Path) -> list[Path]:
    """The folder's safetensors files, those that its index names where it has one."""
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise UserError(f"{folder / INDEX}: not an index of safetensors files") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder / missing[0]}: there is no such file, which {INDEX} names")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickles:
        raise UserError(
            f"{folder / pickles[0]}: a pickle, which can run any code and is never opened: save the model as safetensors"
        )
    raise UserError(f"{folder}: it holds no model.safetensors and no {INDEX}")


class Outgoing(NamedTuple):
    """A tensor to be written; `make` is called when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def write_tensors(folder: Path, tensors: Iterable[Outgoing], shard_bytes: int, progress=lambda bytes: None) -> None:
    """Writes `tensors` as safetensors files of at most `shard_bytes` each (of one tensor where that is larger), with an
    index where there are several. Memory: one file's tensors."""
    from safetensors.numpy import save_file

    shards: list[list[Outgoing]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    names = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        made = {}
        for tensor in shard:
            made[tensor.name] = np.ascontiguousarray(tensor.make())
            progress(tensor.bytes)
        save_file(made, folder / name, {"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.bytes for shard in shards for tensor in shard)
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def common_dtype(stored: dict[str, Stored]) -> str:
    """The dtype that most of the tensors have."""
    return Counter(tensor.dtype for tensor in stored.values()).most_common(1)[0][0]
