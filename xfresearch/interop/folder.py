"""Reads and writes Hugging Face folders on disk: config.json and one or more safetensors files. No pickle is opened."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from xfresearch.interop.tensor_files import DTYPES, PendingTensor, StoredTensor, tensors_in, write
from xfresearch.runtime.errors import UserError, shortened
from xfresearch.runtime.files import files_in, found_in, inside, names_in, read_bytes, read_object, write_text
from xfresearch.runtime.formats import check_whole
from xfresearch.runtime.model_paths import with_models

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth")
OF_TRAINING = ("training_args.bin", "optimizer.*", "scheduler.pt", "scaler.pt", "rng_state*")  # pickles without weights
# Weights that are not read: {patterns of their files: (what they are, what writes safetensors of them)}.
_WRITES = ", or let transformers {} write them: from_pretrained(folder, {}), then save_pretrained"
_FOREIGN = {
    ("*.gguf",): ("GGUF, the weights of llama.cpp,", _WRITES.format(5, "gguf_file=name")),
    ("*.msgpack",): ("the weights of Flax", _WRITES.format(4, "from_flax=True")),
    ("*.h5", "*.ckpt*.index", "saved_model.pb"): ("the weights of TensorFlow", _WRITES.format(4, "from_tf=True")),
    ("*.onnx", "onnx/*.onnx"): ("ONNX", ""),
}
_WEIGHTS = ("*.safetensors", INDEX, *PICKLES, *chain.from_iterable(_FOREIGN))


def is_folder(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder: not one of our runs, and with weights or a Hugging Face config.json."""
    if not path.is_dir() or (path / "checkpoints").exists():
        return False
    return bool(_weights(path)) or bool({"model_type", "architectures"} & _config_or_nothing(path).keys())


def _weights(folder: Path) -> list[str]:
    """The files of weights in a folder, of this and other libraries."""
    return [name for name in names_in(folder) if _matches(name, *_WEIGHTS)]


def _matches(name: str, *patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_foreign(folder: Path) -> None:
    """Raises UserError for a folder with weights of another library, or with models in it."""
    for patterns, (what, writes) in _FOREIGN.items():
        found = [path for pattern in patterns for path in found_in(folder, pattern)]
        if found:
            raise UserError(f"{found[0]}: {what} cannot be read: take safetensors of the same model{writes}")
    if what := with_models(folder):
        raise UserError(f"{folder} is {what}")


def _config_or_nothing(folder: Path) -> dict:
    try:
        return read_config(folder)
    except UserError:
        return {}


def read_config(folder: Path) -> dict:
    """The folder's config.json. Raises UserError if it is missing or not a JSON object."""
    file = inside(folder, "config.json")
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(f"{folder}: an adapter (LoRA) without its model: merge it into the model, and give that folder")
        _check_foreign(folder)
        raise UserError(f"{file}: file not found: a Hugging Face folder must have one")
    return read_object(file)


def check_adapter(folder: Path) -> None:
    """Raises UserError if the folder has an adapter (peft), instead of a model's weights or beside them."""
    file = inside(folder, ADAPTER)
    if not file.is_file():
        return
    config = read_object(file)
    kind, base = config.get("peft_type", "adapter"), config.get("base_model_name_or_path")
    of = f" of {base}" if base else ""
    raise UserError(
        f"{file}: a {kind} adapter{of} is not supported: merge it into the weights (merge_and_unload of peft), "
        "or remove its files to read the weights without it"
    )


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the folder's safetensors files, by name. Raises UserError if a file is missing or damaged."""
    tensors: dict = {}
    for file in _files(folder):
        for tensor in tensors_in(file):
            if tensor.name in tensors:
                raise UserError(f"{file}: tensor {tensor.name} is also in {tensors[tensor.name].file.name}")
            tensors[tensor.name] = tensor
    if not tensors:
        raise UserError(f"{folder}: its safetensors files contain no tensor")
    return tensors


def _files(folder: Path) -> list[Path]:
    """The folder's safetensors files: model.safetensors, or those that its index lists. `transformers`, too, reads no
    index beside model.safetensors."""
    if (whole := inside(folder, "model.safetensors")).is_file():
        return [whole]
    index = inside(folder, INDEX)
    if index.is_file():
        try:
            names = sorted(set(json.loads(read_bytes(index))["weight_map"].values()))
            files = [folder / name for name in names]
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
            check_whole(index)
            raise UserError(f"{index}: not an index of safetensors files") from None
        present = set(names_in(folder))
        for name in names:  # it may be no name of a file
            if name not in present or not inside(folder, name).is_file():
                raise UserError(f"{index}: it lists {shortened(str(name))}, which is not in the folder")
        return files
    if shards := _shards(folder):
        return shards
    pickles = [name for name in _weights(folder) if _matches(name, *PICKLES) and not _matches(name, *OF_TRAINING)]
    if pickles:
        raise UserError(
            f"{folder / pickles[0]}: pickle files can run arbitrary code and are not supported: "
            "save the model as safetensors"
        )
    _check_foreign(folder)
    others = [name for name in _weights(folder) if name != INDEX]
    hint = f": the names of its files, such as {others[0]}, are not those of a model's weights" if others else ""
    raise UserError(f"{folder}: it has neither model.safetensors nor {INDEX}{hint}")


def _shards(folder: Path) -> list[Path]:
    """The files model-00001-of-N.safetensors to N of a folder without an index; [] if there are none. Raises UserError if
    one is missing."""
    found = [file for file in files_in(folder, pattern="model-*.safetensors") if SHARD.fullmatch(file.name)]
    totals = {match[2] for file in found if (match := SHARD.fullmatch(file.name))}
    if len(totals) > 1:
        raise UserError(f"{folder}: it has shards of several models, {found[0].name} and {found[-1].name}, and no {INDEX}")
    names = [f"model-{number + 1:05}-of-{total}.safetensors" for total in totals for number in range(int(total))]
    missing = sorted(set(names) - {file.name for file in found})
    if missing:
        raise UserError(f"{folder}: {missing[0]} is missing, and there is no {INDEX}")
    return found


def write_tensors(
    folder: Path, tensors: Iterable[PendingTensor], shard_bytes: int, progress=lambda bytes: None
) -> None:
    """Writes `tensors` as safetensors files of at most `shard_bytes` each, with an index if there are several files.

    A tensor larger than `shard_bytes` gets a file of its own.
    """
    shards: list[list[PendingTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    names = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        write(folder / name, shard, progress)
    if len(shards) > 1:
        total = sum(tensor.bytes for shard in shards for tensor in shard)
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def common_dtype(stored: dict[str, StoredTensor]) -> str:
    """The dtype that most of the tensors have. Raises UserError if no tensor has a supported dtype."""
    known = [tensor.dtype for tensor in stored.values() if tensor.dtype in DTYPES.values()]
    if not known:
        next(iter(stored.values())).require_dtype()
    return Counter(known).most_common(1)[0][0]
