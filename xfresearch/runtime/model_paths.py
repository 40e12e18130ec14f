"""What a path may mean that is no model: the name of one on the Hub, or a folder that has models in it."""

import re
from pathlib import Path

from xfresearch.runtime.errors import UserError
from xfresearch.runtime.files import exists, found_in

_HUB = re.compile(
    r"(?:(?:https://)?(?:huggingface\.co|hf\.co)/|hf://)?(?P<name>(?:\w[\w.-]*/)?\w[\w.-]*?)(?:/|/tree/[\w.-]+)?"
)
_FILE = re.compile(r".*\.[a-z]+")  # versions, as in Llama-3.2-1B, have a digit after the point
# Where a folder that is no model has models: {a file of each: what the folder is}.
_INSIDE = {
    "checkpoint-*/*config.json": "the output of a Trainer",
    "snapshots/*/*config.json": "a model in the Hub's cache",
    "models--*/snapshots/*/*config.json": "the Hub's cache",
    "*/*.safetensors": "a folder of models",
    "*/checkpoints": "a folder of runs",
}


def if_on_hub(path) -> str:
    """'if it is a model of the Hub, `hf download gpt2 --local-dir models/gpt2` fills ...; otherwise ', in front of what a
    path must be, for a `path` that does not exist and may be the name or the address of such a model; '' for others."""
    match = _HUB.fullmatch(str(path))
    name = match["name"] if match else ""
    owner, _, model = name.rpartition("/")
    if not name or _FILE.fullmatch(name) or "--" in name or owner and exists(Path(owner)):
        return ""
    fills = f"`hf download {name} --local-dir models/{model}` fills the folder models/{model}, which is then the path"
    return f"if it is a model of the Hub, {fills}; otherwise "


def require_path(path, wanted: str) -> None:
    """Raises UserError for an address of the Web, which is no path. `wanted` says what it must be."""
    if re.match(r"https?://|hf://", str(path)):
        raise UserError(f"{path} is an address, not a path: {if_on_hub(path)}{wanted}")


def with_models(folder) -> str:
    """'the output of a Trainer: give ...' of a folder that has models in it; '' for others. Nothing is opened."""
    for pattern, what in _INSIDE.items():
        found = sorted({path.parent for path in found_in(folder, pattern)}, key=_newest_first)
        if found:
            which = "the model in it," if len(found) == 1 else f"one of the {len(found)} in it, such as"
            return f"{what}: give {which} {found[0]}"
    return ""


def _newest_first(path) -> tuple[int, str]:
    """The order of checkpoints by their steps, checkpoint-1000 before checkpoint-500."""
    step = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return -int(step[1]) if step else 0, str(path)
