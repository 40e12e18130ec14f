"""Every variant that the config can express, one option away from a base, and every named config at its tiny size.

Nothing is listed by hand that can be read from the config's classes and the tables: each choice of each `Literal` and
`bool` field is a variant, so a new choice is tested by every contract as soon as it exists. Numbers have no such list;
`NUMBERS` gives theirs, and test_discovery.py fails for a field that is neither.
"""

import dataclasses
import itertools
import math
import re
import typing
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xfresearch.config import AttentionConfig, BlockConfig, FeedForwardConfig, ModelConfig, MoeConfig
from xfresearch.config_io import parse
from xfresearch.models import transformer
from xfresearch.models.axes import bounds_of, path_name
from xfresearch.models.context import Context
from xfresearch.models.kernel_choices import with_kernels
from xfresearch.models.layouts import LAYOUTS
from xfresearch.resolving import resolve_model

ROOT = Path(__file__).parent.parent.parent
BATCH, LENGTH = 2, 8

# Sizes are those of the named configs at :tiny, so that all variants share most of their compiled operations.
MAIN = BlockConfig(
    attention=AttentionConfig(heads=4), feed_forward=FeedForwardConfig(hidden=32, moe=MoeConfig(experts=8))
)
BASE = ModelConfig(width=32, depth=2, vocab_size=64, max_length=64, blocks={"main": MAIN})

# What a choice cannot do without, added to its variant: fields of the model, or else of its block.
NEEDS = {
    ("position_offset", "*"): {"position": "learned"},
    ("layout", "all_attention"): {"attention.memory_slots": 32, "feed_forward.hidden": 0, "final_norm": "none"},
    ("layout", "attention_only"): {"feed_forward.hidden": 0},
    ("layout", "post_norm"): {"final_norm": "none"},
    ("layout", "deep_norm"): {"final_norm": "none"},
    ("attention.kind", "slots"): {"attention.memory_slots": 32},
    ("attention.memory_activation", "*"): {"attention.memory_slots": 32},
    ("attention.query", "identity_whole"): {"attention.head_size": 32},
    ("attention.key", "identity_whole"): {"attention.head_size": 32},
    ("attention.qk_norm_over", "heads"): {"attention.qk_norm": "rms", "attention.kv_heads": 2},
    ("attention.clip", "*"): {"attention.qk_norm": "rms", "attention.position": "rope"},
    ("attention.softcap", 1.0): {"attention.position": "t5", "attention.memory_slots": 32},
    ("attention.rank", "*"): {"attention.query": "merged"},
    ("attention.memory_heads", "shared"): {"attention.memory_slots": 32},
    ("attention.rope.fraction", "*"): {"attention.position": "rope"},
    ("attention.rope.scaling", "linear"): {"attention.position": "rope"},
    ("attention.rope.scaling", "llama3"): {"attention.position": "rope", "attention.rope.original_length": 64},
    ("attention.rope.scaling", "yarn"): {"attention.position": "rope", "attention.rope.original_length": 64},
    ("attention.sees_itself", False): {"attention.position": "relative_key", "attention.memory_slots": 32},
    ("attention.span", "adaptive"): {"attention.window": 6, "attention.span_ramp": 4},
    ("norm_bare", "*"): {"norm_bias": True},
    ("norm_alpha", "*"): {"norm": "dyt"},
    ("feed_forward.gated_hidden", "*"): {
        "feed_forward.hidden": 0,
        "feed_forward.hidden_factor": 3.0,
        "feed_forward.kind": "swiglu",
    },
    ("feed_forward.hidden_factor", "*"): {"feed_forward.hidden": 0},
    ("feed_forward.moe.top_k", 1): {"feed_forward.moe.renormalise": False},
    # With sigmoid scores, DeepSeek-V3.
    ("feed_forward.moe.balance", "bias"): {"feed_forward.moe.scores": "sigmoid"},
}
# Values for fields that are numbers; every other number is among SIZES or ELSEWHERE.
NUMBERS = {
    "logit_softcap": [2.0],
    "position_offset": [2],
    "blocks.main.norm_epsilon": [0.1],
    "blocks.main.norm_offset": [1.0],
    "blocks.main.attention.kv_heads": [1, 2],
    "blocks.main.attention.head_size": [6],
    "blocks.main.attention.rank": [6],
    "blocks.main.attention.scale": [0.2],
    "blocks.main.attention.window": [3],
    "blocks.main.attention.clip": [0.8],
    "blocks.main.attention.softcap": [1.0, 2.0],
    "blocks.main.attention.memory_slots": [32],
    "blocks.main.attention.rope.fraction": [0.5],
    "blocks.main.feed_forward.hidden_factor": [1.5],
    "blocks.main.attention.lambdas.key_size": [6],
    "blocks.main.attention.lambdas.window": [3, 0],
    "blocks.main.attention.lambdas.depth": [2],
    "blocks.main.attention.lambdas.chunk": [3],
    "blocks.main.feed_forward.moe.top_k": [1],
    "blocks.main.feed_forward.moe.capacity": [0.125],  # 2 tokens of 64 for each expert: most of LENGTH are dropped
    "blocks.main.feed_forward.moe.shared": [2],
}
# Fields that take the names of a table which another field varies in full, by the same code: a few of them.
FEW = {
    "embedding_norm": ["layer"],
    "final_norm": ["dyt", "none"],
    "blocks.main.attention.qk_norm": ["rms", "layer"],
    "blocks.main.attention.memory_activation": ["relu", "gelu"],
    "blocks.main.feed_forward.moe.expert": ["relu", "geglu"],
}
TUPLES = {
    "blocks.main.norm_bare": [("attention_in",)],
    "blocks.main.attention.bias": [("query", "key", "value", "output"), ("output",)],
}
SIZES = {
    *("width", "depth", "vocab_size", "max_length", "pattern", "blocks"),
    *("blocks.main.attention.heads", "blocks.main.feed_forward.hidden", "blocks.main.feed_forward.moe.experts"),
}
# Fields whose effect is not on the deterministic forward pass in one precision, and the test that covers them.
ELSEWHERE = {
    "init": "tests/models/test_initialisation.py",
    "init_std": "tests/models/test_initialisation.py",
    "embedding_std": "tests/models/test_initialisation.py",
    "blocks.main.norm_alpha": "tests/models/test_initialisation.py",
    "blocks.main.norm_alpha_attention": "tests/models/test_controls.py",
    "blocks.main.branch_gain": "tests/models/test_initialisation.py",
    "dtype": "tests/models/test_precision.py",
    "param_dtype": "tests/models/test_precision.py",
    "blocks.main.norm_cast": "tests/models/test_precision.py",
    "causal": "tests/models/test_bidirectional.py",
    "dropout": "tests/models/test_dropout.py",
    "blocks.main.dropout": "tests/models/test_dropout.py",
    "blocks.main.attention.dropout": "tests/models/test_dropout.py",
    "blocks.main.attention.kernel": "tests/contracts/test_kernels.py",
    "blocks.main.feed_forward.moe.kernel": "tests/contracts/test_kernels.py",
    "blocks.main.attention.rope.theta": "tests/models/test_positions.py",
    "blocks.main.attention.rope.factor": "tests/models/test_positions.py",
    "blocks.main.attention.rope.low_frequency": "tests/models/test_positions.py",
    "blocks.main.attention.rope.high_frequency": "tests/models/test_positions.py",
    "blocks.main.attention.rope.attention_factor": "tests/models/test_positions.py",
    "blocks.main.attention.rope.original_length": "tests/models/test_positions.py",
    "blocks.main.attention.t5_buckets": "tests/models/test_positions.py",
    "blocks.main.attention.t5_distance": "tests/models/test_positions.py",
    "blocks.main.attention.trimmed": "tests/models/test_adaptive_span.py",
    "blocks.main.attention.span_ramp": "tests/models/test_adaptive_span.py",
    "blocks.main.attention.span_loss": "tests/models/test_adaptive_span.py",
    "blocks.main.feed_forward.moe.routing": "tests/models/test_bidirectional.py",
    "blocks.main.feed_forward.moe.jitter": "tests/models/test_moe.py",
    "blocks.main.feed_forward.moe.bias_speed": "tests/training/test_routing.py",
    "blocks.main.feed_forward.moe.balance_loss": "tests/models/test_parts.py",
    "blocks.main.feed_forward.moe.z_loss": "tests/models/test_parts.py",
}


def change(config, path: str, value):
    """`config` with the field at a dotted path set to `value`."""
    name, _, rest = path.partition(".")
    if isinstance(config, dict):
        return {**config, name: change(config[name], rest, value)}
    return replace(config, **{name: change(getattr(config, name), rest, value) if rest else value})


def get(config, path: str):
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def model(changes: dict | None = None, base: ModelConfig = BASE) -> ModelConfig:
    """The base with dotted `changes`, resolved."""
    for path, value in (changes or {}).items():
        base = change(base, path, value)
    return resolve_model(base)


def fields(cls=ModelConfig, prefix: str = "") -> dict:
    """{dotted path: type} of every leaf of a model's config whose only block is 'main'."""
    found, hints = {}, typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        kind = BlockConfig if spec.name == "blocks" else hints[spec.name]
        path = prefix + ("blocks.main" if spec.name == "blocks" else spec.name)
        found |= fields(kind, path + ".") if dataclasses.is_dataclass(kind) else {path: kind}
    return found


def choices() -> dict:
    """{dotted path: values other than the base's} of every field with a closed list of values, and of NUMBERS."""
    found = {}
    for path, kind in fields().items():
        closed = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        closed = (False, True) if kind is bool else closed
        if closed and path not in ELSEWHERE and ".norms." not in path:
            found[path] = [value for value in closed if value != get(BASE, path)]
    return found | NUMBERS | FEW | TUPLES


def needed(path: str, value) -> dict:
    short = path.removeprefix("blocks.main.")
    groups = {"feed_forward.moe.": {"feed_forward.kind": "moe"}, "attention.lambdas.": {"attention.kind": "lambda"}}
    needs = next((change for group, change in groups.items() if short.startswith(group)), {})
    needs = needs | NEEDS.get((short, value), {}) | NEEDS.get((short, "*"), {})
    return {name if hasattr(BASE, name) else f"blocks.main.{name}": v for name, v in needs.items()}


def single() -> dict:
    """One field changed at a time."""
    found = {"base": {}}
    for path, values in choices().items():
        for value in values:
            found[f"{path.removeprefix('blocks.main.')}={value}"] = {path: value, **needed(path, value)}
    return found


def _positions() -> dict:
    """A position added to the embedding with every one inside attention."""
    pairs = itertools.product(["learned"], typing.get_args(fields()["blocks.main.attention.position"]))
    return {f"positions={a}+{b}": {"position": a, "blocks.main.attention.position": b} for a, b in pairs}


def _sites() -> dict:
    """Layouts that together have every site, each with a different norm at each of its sites."""
    found, seen = {}, set()
    for name, layout in LAYOUTS.items():
        sites = [f"{s.name}_{place}" for s in layout.sublayers for place in s.norms]
        if not set(sites) <= seen:
            seen |= set(sites)
            kinds = dict(zip(sites, itertools.cycle(("rms", "none", "layer")), strict=False))
            found[f"sites-{name}"] = {
                "blocks.main.layout": name,
                **{f"blocks.main.norms.{site}": kind for site, kind in kinds.items()},
                **needed("blocks.main.layout", name),
            }
    return found


def _patterns() -> dict:
    """Models of several blocks, one of them twice, with layers that share nothing."""
    sparse = model({"blocks.main.feed_forward.kind": "moe", "blocks.main.layout": "peri_norm"}).blocks["main"]
    memory = model({"blocks.main.layout": "all_attention", **needed("blocks.main.layout", "all_attention")}).blocks["main"]
    windows = [{"attention.position": "relative_key", "attention.window": w} for w in (5, 0)]
    near, far = (model({f"blocks.main.{k}": v for k, v in change.items()}).blocks["main"] for change in windows)
    return {
        "pattern-windows": {"blocks": {"near": near, "far": far}, "pattern": ("near", "far")},
        "pattern": {"blocks": {"dense": MAIN, "sparse": sparse}, "pattern": ("sparse", "dense"), "depth": 4},
        "pattern-repeated": {
            "blocks": {"dense": MAIN, "memory": memory},
            "pattern": ("dense", "memory", "dense"),
            "depth": 3,
        },
    }


def _memories() -> dict:
    """The feed-forward restated as memory in a layer of its own, after one of attention alone; slots of the heads' sizes."""
    slots = {"kind": "slots", "memory_slots": 32}
    wide = replace(MAIN, layout="attention_only", feed_forward=FeedForwardConfig())
    blocks = {
        "tokens": replace(wide, attention=AttentionConfig(heads=4, position="rope")),
        "wide": replace(wide, attention=AttentionConfig(**slots, memory_activation="relu", bias=("output",))),
        "slots": replace(wide, attention=AttentionConfig(**slots, heads=4, kv_heads=2, bias=("query",), softcap=2.0)),
    }
    beside = {"blocks.main.attention.memory_slots": 32, "blocks.main.attention.kv_heads": 2}
    return {
        "memory-layers": {"blocks": blocks, "pattern": ("tokens", "wide", "slots"), "depth": 3},
        "attention.position=rope+slots": {"blocks.main.attention.position": "rope", **beside},
    }


def _named() -> dict:
    """Every file in configs/ at its tiny size, with a small vocabulary where the tokenizer would give it."""
    files = [f for f in sorted((ROOT / "configs").glob("*.py")) if "def get_config(" in f.read_text()]
    models = {f.stem: parse(["--config", f"{f}:tiny"]).model for f in files}
    return {name: m if m.vocab_size else replace(m, vocab_size=BASE.vocab_size) for name, m in models.items()}


def _variants() -> dict:
    """{name: config}, the first name of each of several equal configs."""
    found = {}
    for name, changes in (single() | _positions() | _sites() | _patterns() | _memories()).items():
        config = model(changes)
        if config not in found.values():
            found[name] = config
    return found


VARIANTS = _variants()
NAMED = _named()
ALL = VARIANTS | {f"configs/{name}.py": m for name, m in NAMED.items()}


KEPT = [f"configs/{name}.py" for name in ("gpt2", "mixtral_8x7b", "lambda_lm", "simplified")]


def _distinct() -> list[str]:
    """Names of variants whose parameters, layouts or ways of mixing positions no variant before them has: what decides how
    a program is cut over devices. Tests of that take the others under the marker `long`."""
    seen, names = set(), []
    for name, config in ALL.items():
        leaves = jax.tree_util.tree_leaves_with_path(transformer.abstract(config)["blocks"])
        paths = {(re.sub(r"^blocks/[^/]+/", "", path_name(path)), leaf.ndim) for path, leaf in leaves}
        new = {(path, b.layout) for b in config.blocks.values() for path in paths}
        for a in (block.attention for block in config.blocks.values()):
            new |= {(a.kind, a.position, a.shaping), (a.query, a.key, a.value, a.output), a.kv_heads, bool(a.window)}
        new |= {(b.feed_forward.kind == "moe" and b.feed_forward.moe.capacity > 0) for b in config.blocks.values()}
        if new - seen or "pattern" in name or name in KEPT:
            names.append(name)
        seen |= new
    return names


DISTINCT = _distinct()


def marked(names=None, among=ALL) -> list:
    """Parameters of a test: all variants, those that are not among `names` (DISTINCT unless given) under `long`."""
    names = DISTINCT if names is None else names
    return [pytest.param(name, marks=() if name in names else pytest.mark.long) for name in among]


def plain(config: ModelConfig) -> ModelConfig:
    return with_kernels(config, "plain", "ragged")


def in_float64(config: ModelConfig) -> ModelConfig:
    return replace(config, dtype="float64", param_dtype="float64")


def tokens_for(config: ModelConfig, batch: int = BATCH, length: int = LENGTH):
    return np.random.default_rng(7).integers(0, config.vocab_size, (batch, length)).astype(np.int32)


def random_params(config: ModelConfig, seed: int = 0) -> dict:
    """Parameters with nothing left at zero or one, so that no gain or bias can hide."""
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        centre = 1.0 if path_name(path).endswith("gain") else 0.0
        value = centre + 0.3 * random.standard_normal(leaf.shape)
        low_high = bounds_of(path_name(path))
        return jnp.asarray(np.abs(value).clip(*low_high) if low_high else value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, transformer.abstract(config))


def forward(config: ModelConfig, params, tokens_BL, layers: str = "unroll", remat: str = "none", **context):
    """Logits and auxiliary losses; positions count from 0 unless `context` gives them."""
    model = transformer.bind(config, params)
    positions_BL = np.broadcast_to(np.arange(tokens_BL.shape[1]), tokens_BL.shape)
    out = model(tokens_BL, Context(**{"positions_BL": positions_BL, **context}), layers=layers, remat=remat)
    return model.logits(out.hidden_BLD), out.losses


def tree_error(actual, expected) -> float:
    """Largest difference over the largest expected value of the whole tree: some gradients (that of a key's bias, which
    shifts all logits alike) are zero but for rounding."""
    leaves = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    assert all(a.shape == e.shape for a, e in leaves)
    return float(max(abs(a - e).max() for a, e in leaves) / max(abs(e).max() for _, e in leaves))


def mesh_sizes(config: ModelConfig, devices: int) -> dict[str, int]:
    """Every axis that the model can be cut along, in twos; the batch takes what is left."""
    options = [block.attention for block in config.blocks.values()]
    heads = [a.heads for a in options] + [a.kv_heads for a in options if a.kv_heads > 1]  # a single one is every device's
    experts = [b.feed_forward.moe.experts for b in config.blocks.values() if b.feed_forward.kind == "moe"]
    sizes = {"fsdp": 2, "expert": math.gcd(2, *experts) if experts else 1, "tensor": math.gcd(2, *heads)}
    sizes["context"] = 2 if devices >= 32 else 1
    return {"data": devices // math.prod(sizes.values()), **sizes}
