"""One change from a common base: GPT-2's block with learned positions, about 3 M parameters, on WikiText-2 as bytes.

variants           the base
variants:NAME      the base with one change; docs/data/tables/variants.md has the names
variants:tiny      the base at a size that runs in less than a minute on two cores

Every value in a table of models/catalogue.py is a variant: a layout, a norm, a kind of position, of mixer or of feed-forward
layer. OTHERS change other options. configs/studies/ compares some variants.
"""

from typing import NamedTuple

from xfresearch.configs import common
from xfresearch.models.catalogue import TABLES
from xfresearch.models.feed_forwards.dense import GatedConfig
from xfresearch.runtime.errors import UserError, nearest


class Variant(NamedTuple):
    what: str
    source: str
    changes: dict  # {key of config.model.blocks.main, or of config.model with a leading dot: value}


# The keys whose values are in tables, and their values in the base.
BASE = {
    **{"layout": "pre_norm", "norm": "layer", ".position": "learned"},
    **{"attention.kind": "softmax", "attention.position": "none", "feed_forward.kind": "gelu"},
}
# What a value needs beside itself, or has in its paper, where no rule of `_also` says it.
ALSO: dict[str, dict] = {
    "peri_norm": {".embedding_norm": "layer"},
    "all_attention": {"attention.memory_slots": 1024},
    "macaron": {"feed_forward_1.hidden": 512, "feed_forward_2.hidden": 512},
    "skipless": {  # SAS, but without the first layer's W_V
        **{"attention.shaping": "shaped", "attention.value": "identity", "attention.output": "identity"},
        "feed_forward.hidden": 1280,
    },
    "dyt": {".final_norm": "dyt"},
    "derf": {".final_norm": "derf"},
    "differential": {"attention.heads": 2},
    "lambda": {".position": "none"},
    "slots": {"attention.memory_slots": 256},
    "moe": {"feed_forward.hidden": 80},
}


def _of_tables() -> dict[str, Variant]:
    """A variant for each value in a table, except those of the base and those that need a source."""
    made = {}
    for key, usual in BASE.items():
        for name, entry in TABLES[key.removeprefix(".")].items():
            if name not in ("none", usual) and not getattr(entry, "reads_source", False):
                also = _also(key, entry) | ALSO.get(name, {})
                what = "; ".join([entry.formula, *(f"{k.removeprefix('.')}={v!r}" for k, v in also.items())])
                made[name] = Variant(what, entry.paper or "-", {key: name} | also)
    return made


def _also(key: str, entry) -> dict:
    """What a value needs beside itself because of what it is."""
    if key == "layout":
        last = entry.branches[-1]
        return {".final_norm": "none"} if "post" in last.norms and not last.connection.ends_with else {}
    if key == "attention.position":
        return {".position": "none"}
    gated = key == "feed_forward.kind" and entry.options is GatedConfig
    return {"feed_forward.gated_hidden": "matched"} if gated else {}


MOE = {"feed_forward.kind": "moe"} | ALSO["moe"]
OTHERS = {
    "v_skip_init": Variant(
        "aI + bA without skip, b = 0 at first",
        "He et al. 2023",
        {"layout": "skipless", "attention.shaping": "skip_init"},
    ),
    "qk_norm": Variant("RMSNorm on queries and keys", "Henry et al. 2020", {"attention.qk_norm": "rms"}),
    # attention's matrices
    "query_identity_whole": Variant(
        "every head's query is the whole input", "-", {"attention.query": "identity_whole", "attention.heads": 1}
    ),
    "key_identity": Variant("W_K = I", "-", {"attention.key": "identity"}),
    "value_identity": Variant("W_V = I", "He & Hofmann 2023", {"attention.value": "identity"}),
    "value_is_key": Variant("values are the keys", "-", {"attention.value": "key"}),
    "output_identity": Variant("W_O = I", "-", {"attention.output": "identity"}),
    "merged_rank_16": Variant(
        "x W_h x^T of rank 16", "-", {"attention.query": "merged", "attention.rank": 16}
    ),
    # positions
    "no_position": Variant("no positions", "-", {".position": "none"}),
    "adaptive_span": Variant(
        "each head learns its span", "Sukhbaatar et al. 2019a", {"attention.span": "adaptive"}
    ),
    # what heads read and write
    "output_gate": Variant(
        "heads times sigmoid(x W_g) before W_O", "Qiu et al. 2025", {"attention.output_gate": "elementwise"}
    ),
    "head_gate": Variant(
        "the same with one gate for each head", "Qiu et al. 2025", {"attention.output_gate": "head"}
    ),
    "off_by_one": Variant(
        "softmax with 1 more in its denominator", "Miller 2023", {"attention.sink": "off_by_one"}
    ),
    "learned_sink": Variant(
        "softmax with e^b more in its denominator, b trained for each head", "gpt-oss 2025", {"attention.sink": "learned"}
    ),
    # memory
    "memory_beside": Variant(
        "64 persistent slots per head plus feed-forward layer", "Sukhbaatar et al. 2019", {"attention.memory_slots": 64}
    ),
    "memory_restated": Variant(
        "the feed-forward layer as 1024 slots of the model's width, in attention",
        "Sukhbaatar et al. 2019",
        {
            **{"layout": "attention_only", "attention.memory_slots": 1024, "attention.memory_activation": "gelu"},
            "attention.bias": ("output",),
        },
    ),
    # lambda layers
    "lambda_global": Variant(
        "lambda layers over all distances",
        "Bello 2021",
        {".position": "none", "attention.kind": "lambda", "attention.lambdas.window": 0, "feed_forward.hidden": 1408},
    ),
    # experts
    "moe_top_1": Variant(
        "top-1 of 8, gates not renormalised",
        "Fedus et al. 2021",
        MOE | {"feed_forward.moe.top_k": 1, "feed_forward.moe.renormalise": False},
    ),
    "moe_bias": Variant(
        "sigmoid scores, balanced by a bias",
        "DeepSeek-V3 2024",
        MOE | {"feed_forward.moe.scores": "sigmoid", "feed_forward.moe.balance": "bias"},
    ),
    "moe_capacity": Variant("capacity factor 1", "Fedus et al. 2021", MOE | {"feed_forward.moe.capacity": 1.0}),
    "moe_shared": Variant("one shared expert", "DeepSeek-V2 2024", MOE | {"feed_forward.moe.shared": 1}),
}  # fmt: skip
VARIANTS = _of_tables() | OTHERS


def get_config(name: str = "base"):
    if name not in ("base", "tiny", *VARIANTS):
        raise UserError(
            f"there is no variant {name!r}{nearest(name, VARIANTS)} (allowed: base, tiny, {', '.join(VARIANTS)})"
        )
    config = common.base("tiny" if name == "tiny" else "3m")
    config.model.position = "learned"
    for key, value in (VARIANTS[name].changes if name in VARIANTS else {}).items():
        group, _, field = ("model" + key if key[0] == "." else f"model.blocks.main.{key}").rpartition(".")
        here = config
        for part in group.split("."):
            here = here[part]
        here[field] = value
    return config
