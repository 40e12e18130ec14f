"""The structure of the code: imports go one way, files are short, classes have few options."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import xfresearch
from xfresearch.data import objectives
from xfresearch.interop import families
from xfresearch.models import block_config, kinds
from xfresearch.run_config.config import Config

ROOT = Path(__file__).parent.parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "xfresearch").rglob("*.py"))
}
# Every package, and every file of the root (xfresearch is __init__.py), is a room. It imports only rooms of lower groups.
ORDER = (
    {"completion"},
    {"__main__", "bench", "study"},
    {"benchmarks", "studies"},
    {"train", "prepare", "evaluate", "generate", "compare", "convert", "analyze", "edit", "plan"},
    {"comparing", "planning"},
    {"editing", "harness", "training"},
    {"analysis", "evaluation", "surgery"},
    {"loading"},
    {"interop"},
    {"pages", "run_config"},
    {"models"},
    {"checkpoints", "kernels"},
    {"data", "sharding"},
    {"options"},
    {"runtime", "xfresearch"},
)
LEVELS = {room: level for level, group in enumerate(ORDER) for room in group}
# Names of files that several packages have: they play the same role there, or are about the same thing.
SHARED_NAMES = {"attention", "config", "cross_entropy", "generating", "grouped_matmul", "held_out", "llama2c", "loading"}
SHARED_NAMES |= {"loop", "memories", "norms", "options", "panel", "positions", "recall", "registry", "report", "rope"}
SHARED_NAMES.add("tasks")
MOST_ROOMS = 36
MOST_LINES, MOST_OPTIONS = 400, 15

# Modules that a module imports by a name that it makes: those of a table.
LATER = {
    families.__name__: [f"xfresearch.interop.{name}" for name in families.NAMES],
    objectives.__name__: objectives.FILES.values(),
}


def imports(name: str) -> set[str]:
    """The modules of xfresearch that a module imports, including imports inside functions and by tables of names."""
    modules = set(LATER.get(name, ()))
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {module if module in FILES else node.module for module in whole}
        if isinstance(node, ast.Constant) and re.fullmatch(r"xfresearch\.[\w.]+:\w+", str(node.value)):
            modules.add(str(node.value).split(":")[0])  # "xfresearch.data.tasks.lano:Lano"
    return {module for module in modules if module in FILES}


def test_there_are_no_import_cycles():
    try:
        list(TopologicalSorter({name: imports(name) for name in FILES}).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_an_import_cycle_is_detected():
    with pytest.raises(CycleError):
        list(TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())


def room(module: str) -> str:
    """'models' of 'xfresearch.models.layers'."""
    return module.split(".")[1] if "." in module else module


def upward(name: str, imported: set[str]) -> set[str]:
    """Those of the imported modules that a module must not import."""
    own = room(name)
    return {module for module in imported if room(module) != own and LEVELS[room(module)] <= LEVELS[own]}


def test_every_room_has_one_place_in_the_order():
    assert sum(map(len, ORDER)) == len(LEVELS) <= MOST_ROOMS
    assert {room(name) for name in FILES} == LEVELS.keys()


def test_imports_by_name_are_seen():
    assert "xfresearch.interop.t5" in imports("xfresearch.interop.families")
    assert "xfresearch.data.objectives.masked" in imports("xfresearch.data.objectives")
    assert "xfresearch.data.tasks.lano" in imports("xfresearch.data.labels")
    assert "xfresearch.kernels.ring_attention" in imports("xfresearch.kernels.attention")


def test_imports_go_down():
    assert not {name: wrong for name in FILES if (wrong := upward(name, imports(name)))}


def test_an_import_that_goes_up_is_detected():
    assert upward("xfresearch.options.fields", {"xfresearch.models.stack", "xfresearch.runtime.errors"})
    assert upward("xfresearch.editing.rome", {"xfresearch.training.loop"})  # not of its own group, either
    assert not upward("xfresearch.models.stack", {"xfresearch.models.layers", "xfresearch.options.fields"})


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES.values()}
    lengths |= {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in (ROOT / "tests").rglob("*.py")}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_files_of_one_name_do_not_do_different_things():
    names = Counter(path.stem for name, path in FILES.items() if path.stem != "__init__" and room(name) != "configs")
    assert {name for name, count in names.items() if count > 1} <= SHARED_NAMES  # else give the new file another name


def dataclasses_of_options() -> set[type]:
    """Every class of options: of runs, blocks and each kind of sublayer, with their base and nested classes."""
    classes = set()
    waiting = [Config, *block_config.BLOCKS.values()]
    waiting += [kind.options for table, _, _ in kinds.ROLES.values() for kind in table.values()]
    while waiting:
        cls = waiting.pop()
        if cls in classes or not dataclasses.is_dataclass(cls):
            continue
        classes.add(cls)
        waiting += [base for base in cls.__bases__ if base is not object]
        waiting += [type(value) for spec in dataclasses.fields(cls) if (value := default_of(spec)) is not None]
    return classes


def default_of(spec: dataclasses.Field):
    if spec.default is not dataclasses.MISSING:
        return spec.default
    return spec.default_factory() if spec.default_factory is not dataclasses.MISSING else None


def test_no_class_declares_more_than_a_few_options():
    """A config may derive from several classes, but each class declares few options."""
    classes = dataclasses_of_options()
    assert len(classes) > 20
    assert not {cls: n for cls in classes if (n := len(inspect.get_annotations(cls))) > MOST_OPTIONS}


def test_every_module_can_be_imported_alone():
    names = [module.name for module in pkgutil.walk_packages(xfresearch.__path__, "xfresearch.")]
    for name in names:
        peers = ("xfresearch.benchmarks.torch_peer",)
        if not name.startswith(("xfresearch.harness", *peers)):  # need lm_eval, PyTorch
            importlib.import_module(name)
