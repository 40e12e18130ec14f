"""Edits of Hugging Face folders."""

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"  # an example of a tensor


def edit_config(folder: Path, **changes) -> None:
    """Sets keys of config.json; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})  # `transformers` wants the word
