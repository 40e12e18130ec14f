"""The variants that the contracts test: the base with one option changed, and every named config at its tiny size.

Variants are read from the classes of the config and from the tables: each value of each `Literal` and `bool` option,
each kind and each layout is a variant. So every contract tests a new value as soon as it exists. Numbers have no closed
list of values; the cases in tests/variants/ list some, and test_discovery.py fails for an option without values.

An option of a kind that the base does not have contains the kind: blocks.main.attention[lambda].lambdas.window.
"""

import itertools
import re
import typing
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests import changing
from tests.covers import plain_path
from tests.daily import daily
from tests.variants import CASES
from tests.variants.case import Case
from xfresearch.models import transformer
from xfresearch.models.block_config import BLOCKS
from xfresearch.models.feed_forwards.dense import DenseConfig
from xfresearch.models.kinds import ROLES
from xfresearch.models.layouts import LAYOUTS
from xfresearch.models.mixers.slots import SlotsConfig
from xfresearch.models.mixers.softmax.config import SoftmaxConfig
from xfresearch.models.model_config import ModelConfig, mixtures, resolve_model
from xfresearch.options import fields as config_fields
from xfresearch.run_config.config_files import parse
from xfresearch.runtime.trees import path_name

ONE_STACK = {name: layout for name, layout in LAYOUTS.items() if not layout.reads_source}  # others: two_stacks.py
ROOT = Path(__file__).parent.parent.parent
BATCH, LENGTH = 2, 8

# The sizes of the named configs at :tiny, so that all variants share most of their compiled operations.
MAIN = BLOCKS["pre_norm"](attention=SoftmaxConfig(heads=4), feed_forward=DenseConfig(hidden=32))
BASE = ModelConfig(width=32, depth=2, vocab_size=64, max_length=64, blocks={"main": MAIN})
TABLES = {"attention": ROLES["mixer"], "feed_forward": ROLES["feed_forward"]}


def kinds_of(sublayer: str) -> tuple[str, ...]:
    """The kinds whose options are varied, besides the kind of the base: one name for all that share their classes."""
    kinds, _, _ = TABLES[sublayer]
    names = {kind: name for name, kind in kinds.items()}
    del names[kinds[getattr(MAIN, sublayer).kind]]
    return tuple(names.values())


KINDS = {sublayer: kinds_of(sublayer) for sublayer in TABLES}


def path_of(case: Case, name: str) -> str:
    """The path of an option of a case: blocks.main.attention[slots].heads of 'attention.heads' in the case of slots."""
    if hasattr(BASE, name):
        return name
    sublayer, _, option = name.partition(".")
    own = case.option == f"{sublayer}.kind" and case.name != getattr(MAIN, sublayer).kind
    return f"blocks.main.{sublayer}[{case.name}].{option}" if own else f"blocks.main.{name}"


def _needs() -> dict[tuple[str, str], dict]:
    """{(path of an option, its value as text, or '' for all values): options that it needs}"""
    needs = {(f"blocks.main.{case.option}", case.name): case.needs for case in CASES if case.option}
    for case in CASES:
        for key, options in case.needs_of.items():
            name, _, value = key.partition("=")
            needs[path_of(case, name), value] = options
    return needs


NEEDS = _needs()
VALUES = {path_of(case, name): values for case in CASES for name, values in case.values.items()}
SIZES = {path for path, values in VALUES.items() if values == "size"}
# Options with a closed list of values that do not change the deterministic forward pass of a causal model in one precision.
COVERED = {path for path, values in VALUES.items() if values == "covered"}


def change(config, path: str, value):
    """`config` with the option at a dotted path set to `value`."""
    return changing.change(config, plain_path(path), value)


def get(config, path: str):
    for name in plain_path(path).split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def model(changes: dict | None = None, base: ModelConfig = BASE) -> ModelConfig:
    """The base with dotted `changes`, resolved. Kinds and layouts are set first, because they add options."""
    changes = changes or {}
    for path in sorted(changes, key=lambda path: not path.endswith((".kind", ".layout"))):
        base = change(base, path, changes[path])
    return resolve_model(base)


def fields() -> dict:
    """{path: type} of every option of a model with one block 'main', except kinds and layouts."""
    result = _fields(BASE)
    result |= {path: hint for path, (first, hint) in _options_of_kinds().items() if first == path}
    skipless = BLOCKS["skipless"]
    return result | {"blocks.main.branch_gain": typing.get_type_hints(skipless)["branch_gain"]}


def inherited() -> dict:
    """{path of an option that a kind inherits: its path in the first kind that has it}"""
    return {path: first for path, (first, _) in _options_of_kinds().items() if first != path}


def _options_of_kinds() -> dict:
    """{path: (path in the first kind that has the option, type)} of all options of all KINDS."""
    collected = {}
    for sublayer, kinds in KINDS.items():
        group = f"blocks.main.{sublayer}"
        # Classes that derive from one another share their dataclass fields.
        first = {id(leaf.field): f"{group}.{leaf.path}" for leaf in config_fields.leaves(get(BASE, group))}
        for kind in kinds:
            options = get(change(BASE, f"{group}.kind", kind), group)
            ids = {leaf.path: id(leaf.field) for leaf in config_fields.leaves(options)}
            for name, hint in _fields(options).items():
                path = f"{group}[{kind}].{name}"
                collected[path] = first.setdefault(ids[name], path), hint
    return collected


def _fields(config) -> dict:
    leaves = [leaf for leaf in config_fields.leaves(config) if leaf.field.name not in ("kind", "layout")]
    return {leaf.path: typing.get_type_hints(type(leaf.owner))[leaf.field.name] for leaf in leaves}


def choices() -> dict:
    """{path: values that differ from the base} of kinds, layouts, options with a closed list of values, and of cases."""
    collected = {"blocks.main.layout": [name for name in ONE_STACK if name != "pre_norm"]}
    for sublayer in KINDS:
        kinds, default, _ = TABLES[sublayer]
        collected[f"blocks.main.{sublayer}.kind"] = [name for name in kinds if name != default]
    for path, hint in fields().items():
        closed = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
        closed = (False, True) if hint is bool else closed
        if closed and path not in COVERED and ".norms." not in path:
            usual = get(model(needed(path, None)), path)
            collected[path] = [value for value in closed if value != usual]
    listed = VALUES.keys() - SIZES - COVERED
    return collected | {path: VALUES[path] for path in fields() if path in listed}


def needed(path: str, value) -> dict:
    """Options that a value needs: its kind of sublayer, and those in NEEDS."""
    kind = re.search(r"(\w+)\[(\w+)\]", path)
    needs = {f"{kind[1]}.kind": kind[2]} | NEEDS.get((f"blocks.main.{kind[1]}.kind", kind[2]), {}) if kind else {}
    needs = needs | NEEDS.get((path, str(value)), {}) | NEEDS.get((path, ""), {})
    return {name if hasattr(BASE, name) else f"blocks.main.{name}": v for name, v in needs.items()}


def single() -> dict:
    """One option changed at a time."""
    collected = {"base": {}}
    for path, values in choices().items():
        for value in values:
            collected[f"{path.removeprefix('blocks.main.')}={value}"] = {path: value, **needed(path, value)}
    return collected


def _positions() -> dict:
    """Learned positions at the embedding, combined with every kind of position in attention."""
    pairs = itertools.product(["learned"], typing.get_args(fields()["blocks.main.attention.position"]))
    return {f"positions={a}+{b}": {"position": a, "blocks.main.attention.position": b} for a, b in pairs}


def _sites() -> dict:
    """Layouts that together have every norm site, with different norms at neighbouring sites."""
    collected = {}
    seen = set()
    for name, layout in ONE_STACK.items():
        sites = [f"{s.name}_{place}" for s in layout.branches for place in s.norms]
        if not set(sites) <= seen:
            seen |= set(sites)
            kinds = dict(zip(sites, itertools.cycle(("rms", "none", "layer")), strict=False))
            collected[f"sites-{name}"] = {
                "blocks.main.layout": name,
                **{f"blocks.main.norms.{site}.kind": kind for site, kind in kinds.items()},
                **needed("blocks.main.layout", name),
            }
    return collected


def _patterns() -> dict:
    """Models with several blocks, also with a block that occurs twice."""
    sparse = model({"blocks.main.feed_forward.kind": "moe", "blocks.main.layout": "peri_norm"}).blocks["main"]
    memory = model({"blocks.main.layout": "all_attention", **needed("blocks.main.layout", "all_attention")}).blocks[
        "main"
    ]
    windows = [{"attention.position": "relative_key", "attention.window": w} for w in (5, 0)]
    near, far = (model({f"blocks.main.{k}": v for k, v in change.items()}).blocks["main"] for change in windows)
    first = change(MAIN, "norm", "rms")
    segments = ((("first",), 1), (("main", "main"), 0))
    options = {"gain": False, "bias": True, "epsilon": 0.1}
    return {
        "segments": {"blocks": {"first": first, "main": MAIN}, "segments": segments, "depth": 5},
        "single-sites": {f"blocks.main.norms.attention_in.{name}": value for name, value in options.items()},
        "pattern-windows": {"blocks": {"near": near, "far": far}, "pattern": ("near", "far")},
        "pattern": {"blocks": {"dense": MAIN, "sparse": sparse}, "pattern": ("sparse", "dense"), "depth": 4},
        "pattern-repeated": {
            "blocks": {"dense": MAIN, "memory": memory},
            "pattern": ("dense", "memory", "dense"),
            "depth": 3,
        },
    }


def _memories() -> dict:
    """Layers of attention, of slots that replace a feed-forward, and of slots in the softmax; slots with RoPE."""
    slots = {"kind": "slots", "memory_slots": 32}
    alone = BLOCKS["attention_only"]
    blocks = {
        "tokens": alone(attention=SoftmaxConfig(heads=4, position="rope")),
        "wide": alone(attention=SlotsConfig(**slots, memory_activation="relu", bias=("output",))),
        "slots": alone(attention=SlotsConfig(**slots, heads=4, kv_heads=2, bias=("query",), softcap=2.0)),
    }
    with_slots = {"blocks.main.attention.memory_slots": 32, "blocks.main.attention.kv_heads": 2}
    return {
        "memory-layers": {"blocks": blocks, "pattern": ("tokens", "wide", "slots"), "depth": 3},
        "attention.position=rope+slots": {"blocks.main.attention.position": "rope", **with_slots},
    }


def _shipped() -> dict:
    """Every file in configs/ at its tiny size, but not playground, whose model is quickstart's. A vocabulary that the
    tokenizer would set is small."""
    files = [
        f for f in (ROOT / "configs").glob("*.py") if f.stem != "playground" and "def get_config(" in f.read_text()
    ]
    models = {f.stem: parse(["--config", f"{f}:tiny"]).model for f in sorted(files)}
    return {name: m if m.vocab_size else replace(m, vocab_size=BASE.vocab_size) for name, m in models.items()}


def _variants() -> dict:
    """{name: config} without duplicates: of equal configs, the first is kept."""
    collected = {}
    for name, changes in (single() | _positions() | _sites() | _patterns() | _memories()).items():
        config = model(changes)
        if config not in collected.values():
            collected[name] = config
    return collected


VARIANTS = _variants()
SHIPPED = _shipped()
NAMED = {name: m for name, m in SHIPPED.items() if m.encoder is None}  # others: two_stacks.py
ALL = VARIANTS | {f"configs/{name}.py": m for name, m in NAMED.items()}
KEPT = [f"configs/{name}.py" for name in ("gpt2", "mixtral_8x7b", "lambda_lm", "simplified")]


def _distinct() -> list[str]:
    """Names of variants with parameters, layouts or mixers that no earlier variant has, since these determine how a
    program is sharded. Tests of sharding run the other variants with the marker `long`."""
    seen = set()
    names = []
    for name, config in ALL.items():
        leaves = jax.tree_util.tree_leaves_with_path(transformer.abstract(config)["blocks"])
        paths = {(re.sub(r"^blocks/[^/]+/", "", path_name(path)), leaf.ndim) for path, leaf in leaves}
        new = {(path, b.layout) for b in config.blocks.values() for path in paths}
        for options in (block.attention for block in config.blocks.values()):
            names_of = ("kind", "position", "shaping", "query", "key", "value", "output", "kv_heads")
            new |= {(field, getattr(options, field, None)) for field in names_of}
            new |= {("window", bool(getattr(options, "window", 0)))}
        new |= {("capacity", moe.capacity > 0) for moe in mixtures(config)}
        if new - seen or "pattern" in name or name in KEPT:
            names.append(name)
        seen |= new
    return names


DISTINCT = _distinct()


def marked(names=None, among=ALL) -> list:
    """Parameters of a test: all of `among`. Those not in `names` (default: DISTINCT) have the marker `long`."""
    return daily(DISTINCT if names is None else names, among)


def in_float64(config: ModelConfig) -> ModelConfig:
    return replace(config, dtype="float64", param_dtype="float64")


def tokens_for(config: ModelConfig, batch: int = BATCH, length: int = LENGTH):
    return np.random.default_rng(7).integers(0, config.vocab_size, (batch, length)).astype(np.int32)


def random_params(config: ModelConfig, seed: int = 0) -> dict:
    """Random parameters; gains are not 1 and biases are not 0, so that each has an effect."""
    random = np.random.default_rng(seed)

    def draw(path, leaf, axes):
        centre = 1.0 if path_name(path).endswith("gain") else 0.0
        value = centre + 0.3 * random.standard_normal(leaf.shape)
        return jnp.asarray(np.abs(value).clip(*axes.bounds) if axes.bounds else value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, transformer.abstract(config), transformer.axes(config))


def tree_error(actual, expected) -> float:
    """The largest difference divided by the largest expected value in the whole tree: some gradients are zero except
    for rounding (that of a key bias, which shifts all logits equally)."""
    leaves = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    assert all(a.shape == e.shape for a, e in leaves)
    return float(max(abs(a - e).max() for a, e in leaves) / max(abs(e).max() for _, e in leaves))
