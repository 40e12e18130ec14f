"""The configs that come with the package. `--config gpt2:tiny` names one without a path, in any directory.

They are the modules `xfresearch.configs`. In a checkout this is a link to the folder configs/; a wheel has the files.
"""

import ast
import re
from pathlib import Path

from xfresearch.runtime.errors import UserError, closest, did_you_mean, shortened

FOLDER = Path(__file__).parent.parent / "configs"


def shipped() -> dict[str, Path]:
    """{name: file} of every config: of models, such as `gpt2`, of tasks, such as `tasks/sort`, and of studies, such as
    `studies/w_o`."""
    files = [file for folder in ("", "tasks/", "studies/") for file in sorted(FOLDER.glob(f"{folder}*.py"))]
    named = {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files}
    return {name: file for name, file in named.items() if "def get_config" in file.read_text(encoding="utf-8")}


def located(config: str) -> str:
    """`config`, which is FILE[:arg], with the path of a shipped config in the place of its name. Any other FILE is a path:
    `gpt2.py` and `./gpt2` are files of the current directory."""
    name, *argument = config.split(":", 1)
    return ":".join([str(shipped().get(name, name)), *argument])


def docstring(file: Path) -> str:
    """The docstring of a config file, which is not run."""
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def about(file: Path) -> tuple[str, dict[str, str]]:
    """The first sentence of a config's docstring, and {name or name:arg: what it is}, as the docstring lists them."""
    text = docstring(file)
    sentence = re.split(r"(?<! al)[.?](?:\s|$)", " ".join(text.split("\n\n")[0].split()))[0]
    return sentence, dict(re.findall(rf"^({file.stem}(?::\w+)?) {{2,}}(.+)$", text, re.MULTILINE))


def require(config: str) -> Path:
    """The file of `config`, which is FILE[:arg]. Raises UserError if there is none."""
    path = Path(located(config).split(":")[0])
    try:
        there = path.is_file()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise UserError(f"--config={shortened(config, 200)}: there is no such file{nearest(config)} ({listed(config)})")
    return path


def names(studies: bool = False) -> list[str]:
    """The names of the configs of models, or of studies."""
    return [name for name in shipped() if (name.startswith("studies/") if studies else "/" not in name)]


def listed(config: str = "") -> str:
    """The names of the shipped configs, in words: of studies, if `config` would be one of them, otherwise of models."""
    return f"the named configs are {', '.join(names(Path(config.split(':')[0]).parent.name == 'studies'))}"


def nearest(config: str) -> str:
    """'; did you mean 'gpt2:tiny'?' for 'gtp2:tiny' and for 'configs/gpt2.py:tiny'; '' if no name is close."""
    file, *argument = config.split(":", 1)
    by_stem = {Path(name).stem: name for name in shipped()}
    return did_you_mean([":".join([by_stem[stem], *argument]) for stem in closest(Path(file).stem, by_stem)])
