"""One change from a common base: GPT-2's block with learned positions, about 3 M parameters, on WikiText-2 as bytes.

variants           the base
variants:NAME      the base with one change; VARIANTS below and docs/variants.md have the names
variants:tiny      the base at a size that runs in less than a minute on two cores

docs/variants.md has the costs of all variants, and configs/studies/ compares some of them. Choices of named models are not
repeated here: RMSNorm, RoPE and SwiGLU are in `llama`, ReLU in `vanilla_2017_decoder`, one key-value head in `palm`, W_Q = I
in `no_query`, tanh(alpha x) in `dyt`, top-2 experts in `moe`.
"""

from typing import NamedTuple

from xfresearch.configs import common
from xfresearch.runtime.errors import UserError, nearest


class Variant(NamedTuple):
    what: str
    source: str
    changes: dict  # {key of config.model.blocks.main, or of config.model with a leading dot: value}


MOE = {"feed_forward.kind": "moe", "feed_forward.hidden": 80}

VARIANTS = {
    # layouts
    "post_norm": Variant("norm(x + f(x))", "Vaswani et al. 2017", {"layout": "post_norm", ".final_norm": "none"}),
    "peri_norm": Variant(
        "x + norm(f(norm(x))), normed embedding", "Kim et al. 2025", {"layout": "peri_norm", ".embedding_norm": "layer"}
    ),
    "sandwich_norm": Variant("x + norm(f(norm(x)))", "Ding et al. 2021", {"layout": "sandwich_norm"}),
    "parallel": Variant("x + a(n) + f(n), n = norm(x)", "GPT-J, PaLM", {"layout": "parallel"}),
    "parallel_two_norms": Variant("x + a(norm(x)) + f(norm'(x))", "GPT-NeoX", {"layout": "parallel_two_norms"}),
    "no_norm_between": Variant("no norm between attention and feed-forward layer", "-", {"layout": "no_norm_between"}),
    "fused_output": Variant(
        "W_1 reads the heads: no W_O, residual or norm between", "-", {"layout": "fused_output"}
    ),
    "no_residual_between": Variant(
        "W_O, but no residual or norm between it and W_1: the control of fused_output",
        "-",
        {"layout": "no_residual_between"},
    ),
    "no_skip": Variant("no skip around either sublayer", "Graef 2024", {"layout": "no_skip"}),
    "macaron": Variant(
        "attention between two half steps of feed-forward layers",
        "Gulati et al. 2020",
        {"layout": "macaron", ".final_norm": "none", "feed_forward_1.hidden": 512, "feed_forward_2.hidden": 512},
    ),
    "deep_norm": Variant("norm(alpha x + f(x))", "Wang et al. 2022", {"layout": "deep_norm", ".final_norm": "none"}),
    "hyper_connections": Variant(
        "two residual streams that each sublayer mixes", "Zhu et al. 2024", {"layout": "hyper_connections"}
    ),
    "attention_residuals": Variant(
        "each sublayer reads a mixture of all outputs before it", "Kimi Team 2026", {"layout": "attention_residuals"}
    ),
    "attention_residuals_blocks": Variant(
        "the same with the sums of three outputs each", "Kimi Team 2026", {"layout": "attention_residuals_blocks"}
    ),
    "resi_dual": Variant("post-norm with a second, pre-norm stream", "Xie et al. 2023", {"layout": "resi_dual"}),
    "skipless": Variant(
        "shaped attention without skip, W_V and W_O: SAS, but without the first layer's W_V",
        "He & Hofmann 2023",
        {
            **{"layout": "skipless", "attention.shaping": "shaped"},
            **{"attention.value": "identity", "attention.output": "identity", "feed_forward.hidden": 1280},
        },
    ),
    "v_skip_init": Variant(
        "aI + bA without skip, b = 0 at first",
        "He et al. 2023",
        {"layout": "skipless", "attention.shaping": "skip_init"},
    ),
    # norms
    "scale": Variant("LayerNorm's scaling alone: RMSNorm", "Brody et al. 2023", {"norm": "scale"}),
    "project": Variant("LayerNorm's projection alone", "Brody et al. 2023", {"norm": "project"}),
    "derf": Variant("erf(alpha x + shift) as norm", "Chen et al. 2025", {"norm": "derf", ".final_norm": "derf"}),
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
    "alibi": Variant("ALiBi", "Press et al. 2022", {".position": "none", "attention.position": "alibi"}),
    "t5": Variant("T5's buckets", "Raffel et al. 2020", {".position": "none", "attention.position": "t5"}),
    "relative_key": Variant(
        "relative keys shared by all heads and layers",
        "Sukhbaatar et al. 2019",
        {".position": "none", "attention.position": "relative_key"},
    ),
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
    "differential": Variant(
        "the difference of two softmax maps, 2 heads",
        "Ye et al. 2024",
        {"attention.kind": "differential", "attention.heads": 2},
    ),
    "value_residual": Variant(
        "values are mixed with those of the first layer", "Zhou et al. 2024", {"attention.kind": "value_residual"}
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
    # feed-forward
    "relu2": Variant("ReLU squared", "So et al. 2021", {"feed_forward.kind": "relu2"}),
    "softmax": Variant("softmax over the hidden units", "-", {"feed_forward.kind": "softmax"}),
    **{
        kind: Variant(
            f"{title}, hidden size 2/3",
            "Shazeer 2020",
            {"feed_forward.kind": kind, "feed_forward.gated_hidden": "matched"},
        )
        for kind, title in {
            "glu": "GLU",
            "bilinear": "Bilinear",
            "geglu": "GEGLU",
        }.items()
    },
}  # fmt: skip


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
