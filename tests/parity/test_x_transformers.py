"""Models of x-transformers: the same weights give the same logits.

The library differs from the papers' equations in these points; the conversion of weights compensates for them:
- persistent memory: it trains keys and values as they are used; ours are multiplied by sqrt(K) and sqrt(M), as in the
  paper's code;
- SoLU: its LayerNorm has no bias; ours is added to the next bias, multiplied by W_down. It normalises x softmax(x), whose
  variance is near the norm's epsilon; ours normalises x exp(x - max). Both are compared without an epsilon;
- T5: it multiplies the biases by sqrt(K), the paper does not;
- learned positions: it multiplies them by 1/sqrt(D);
- RMSNorm: it has no epsilon;
- RoPE: it rotates adjacent dimensions, of half a head;
- grouped queries: its head h uses key-value head h mod G; in the paper, adjacent heads form a group.
Its softmax is float32 for every dtype of the model, so comparisons in float64 replace it by torch's softmax.
"""

from functools import partial

import numpy as np
import pytest

from tests.parity.weights import DEPTH, HIDDEN, LENGTH, MISSING, WIDTH, config_of, difference, layers_of, matrix, paired

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
x_transformers = pytest.importorskip("x_transformers", reason=MISSING.format("x-transformers"))
pytestmark = pytest.mark.parity

RMS = {"norm": "rms", "final_norm": "rms", "norm_epsilon": 0.0}
SCALE = {"norm": "scale", "final_norm": "scale", "norm_epsilon": 0.0}
DYT = {"norm": "dyt", "final_norm": "dyt", "norm_bias": True}
DERF = {"norm": "derf", "final_norm": "derf", "norm_bias": True}
NO_EPSILON = 1e-30
# {case: (changes of our config, arguments of the library's Decoder)}
CASES = {
    "pre-norm, GELU": ({}, {}),
    "post-norm": ({"layout": "post_norm", "final_norm": "none"}, {"pre_norm": False}),
    "sandwich norm": ({"layout": "sandwich_norm"}, {"sandwich_norm": True}),
    "learned positions": ({"position": "learned"}, {}),
    "tied embeddings": ({"tie_embeddings": True}, {}),
    "persistent memory": ({"attention.memory_slots": 5}, {"attn_num_mem_kv": 5}),
    "persistent memory, grouped": (
        {"attention.memory_slots": 5, "attention.kv_heads": 2},
        {"attn_num_mem_kv": 5, "attn_kv_heads": 2},
    ),
    "all-attention": (
        {"layout": "all_attention", "attention.memory_slots": 24, "final_norm": "none"},
        {"only_attn": True, "pre_norm": False, "attn_num_mem_kv": 24},
    ),
    "SoLU": ({"feed_forward.kind": "solu", "norm_epsilon": NO_EPSILON}, {"ff_solu": True}),
    "ReLU squared": ({"feed_forward.kind": "relu2"}, {"ff_relu_squared": True}),
    "SwiGLU": ({"feed_forward.kind": "swiglu"}, {"ff_glu": True, "ff_swish": True}),
    "GeGLU": ({"feed_forward.kind": "geglu"}, {"ff_glu": True}),
    "DyT": (DYT, {"use_dynamic_tanh": True}),
    "Derf": (DERF, {"use_derf": True}),
    "RMSNorm": (RMS, {"use_rmsnorm": True}),
    "the scaling half of LayerNorm": ({**SCALE, "norm_gain": False}, {"use_simple_rmsnorm": True}),
    "query-key norm": ({**RMS, "attention.qk_norm": "rms"}, {"use_rmsnorm": True, "attn_qk_rmsnorm": True}),
    "ALiBi": ({"attention.position": "alibi"}, {"alibi_pos_bias": True}),
    "ALiBi, 6 heads": (
        {"attention.position": "alibi", "attention.heads": 6, "attention.head_size": 8},
        {"alibi_pos_bias": True},
    ),
    "ALiBi with persistent memory": (
        {"attention.position": "alibi", "attention.memory_slots": 5},
        {"alibi_pos_bias": True, "attn_num_mem_kv": 5},
    ),
    "T5's biases": (
        {"attention.position": "t5", "attention.t5_buckets": 8, "attention.t5_distance": 14},
        {"rel_pos_bias": True, "rel_pos_num_buckets": 8, "rel_pos_max_distance": 14},
    ),
    "RoPE of half a head": (
        {"attention.position": "rope", "attention.rope.fraction": 0.5},
        {"rotary_pos_emb": True, "verbose": False},
    ),
    "multi-query": ({"attention.kv_heads": 1}, {"attn_one_kv_head": True}),
    "grouped queries": ({"attention.kv_heads": 2}, {"attn_kv_heads": 2}),
    "window": ({"attention.window": 5}, {"attn_max_attend_past": 4}),
}
IN_FLOAT32_ONLY = {"RoPE of half a head"}  # the library computes its frequencies in float32


def decoder(config, arguments: dict):
    a = config.blocks["main"].attention
    softmax = partial(torch.nn.functional.softmax, dim=-1)
    sizes = {"dim": WIDTH, "depth": DEPTH, "heads": a.heads, "attn_dim_head": a.head_size, "ff_mult": HIDDEN / WIDTH}
    precise = {"attn_custom_attn_fn": softmax} if config.dtype == "float64" else {}
    layers = x_transformers.Decoder(**sizes, norm_add_unit_offset=False, **precise, **arguments)
    return x_transformers.TransformerWrapper(
        num_tokens=config.vocab_size,
        max_seq_len=LENGTH,
        attn_layers=layers,
        use_abs_pos_emb=config.position == "learned",
        tie_embedding=config.tie_embeddings,
        tie_embedding_scale=1.0,
    )


def state(config, params) -> dict:
    """Our parameters as a state dict of the library."""
    tensors = {"token_emb.emb.weight": params["embed"]["table"]}
    if "head" in params:
        tensors["to_logits.weight"] = params["head"]["table"]
    if "position" in params:
        tensors["pos_emb.emb.weight"] = params["position"]["table"] * WIDTH**0.5
    if "relative_bias" in params.get("shared", {}):
        size = config.blocks["main"].attention.head_size
        tensors["attn_layers.rel_pos.relative_attention_bias.weight"] = params["shared"]["relative_bias"] / size**0.5
    tensors |= norm(config.final_norm, params.get("final_norm", {}), "attn_layers.final_norm")
    sublayers = [(p, name) for p in layers_of(params) for name in ("attention", "feed_forward") if name in p]
    for i, (p, name) in enumerate(sublayers):
        prefix = f"attn_layers.layers.{i}"
        tensors |= (attention if name == "attention" else feed_forward)(config.blocks["main"], p[name], f"{prefix}.1")
        for number, site in enumerate(("in", "out", "post")):
            tensors |= norm(config.blocks["main"].norm, p.get(f"{name}_norm_{site}", {}), f"{prefix}.0.{number}")
    return tensors


def norm(kind: str, p: dict, prefix: str) -> dict:
    """The parameters of a norm; empty if the layout does not have it."""
    alpha = "pre_tanh_scale" if kind == "dyt" else "alpha"
    names = {"gain": "g" if kind == "rms" else "gamma", "bias": "beta", "alpha": alpha, "shift": "s"}
    return {f"{prefix}.{names[name]}": value for name, value in p.items()}


def attention(block, p: dict, prefix: str) -> dict:
    a = block.attention
    rotary = a.position == "rope"
    query, key = ((paired(p[x]["kernel"], a.rope.fraction) if rotary else p[x]["kernel"]) for x in ("query", "key"))
    heads = np.arange(a.heads).reshape(a.kv_heads, -1).T.reshape(-1)  # our heads in the order of the library
    tensors = {f"{prefix}.to_q.weight": matrix(query[:, heads]), f"{prefix}.to_k.weight": matrix(key)}
    tensors[f"{prefix}.to_v.weight"] = matrix(p["value"]["kernel"])
    tensors[f"{prefix}.to_out.weight"] = matrix(p["output"]["kernel"][heads], inputs=2)
    if a.memory_slots:
        tensors[f"{prefix}.mem_k"] = p["memory"]["key"].swapaxes(0, 1) * a.head_size**0.5
        tensors[f"{prefix}.mem_v"] = p["memory"]["value"].swapaxes(0, 1) * a.memory_slots**0.5
    if a.qk_norm == "rms":  # the library has a gain for each head, minus 1
        tensors |= {f"{prefix}.{x}_rmsnorm.gamma": np.tile(p[name]["gain"], (a.heads, 1, 1)) - 1
                  for x, name in (("q", "query_norm"), ("k", "key_norm"))}  # fmt: skip
    return tensors


def feed_forward(block, p: dict, prefix: str) -> dict:
    up = p["up"]
    down = p["down"]
    tensors = {f"{prefix}.ff.2.weight": matrix(down["kernel"]), f"{prefix}.ff.2.bias": down["bias"]}
    if "gate" in p:
        tensors[f"{prefix}.ff.0.proj.weight"] = np.concatenate([matrix(up["kernel"]), matrix(p["gate"]["kernel"])])
        tensors[f"{prefix}.ff.0.proj.bias"] = np.concatenate([up["bias"], p["gate"]["bias"]])
        return tensors
    tensors |= {f"{prefix}.ff.0.0.weight": matrix(up["kernel"]), f"{prefix}.ff.0.0.bias": up["bias"]}
    if "hidden_norm" in p:
        tensors[f"{prefix}.ff.0.1.norm.gamma"] = p["hidden_norm"]["gain"]
        tensors[f"{prefix}.ff.2.bias"] = down["bias"] + p["hidden_norm"]["bias"] @ down["kernel"]
    return tensors


def check(name: str, dtype: str, parity):
    changes, arguments = CASES[name]
    config = config_of({"feed_forward.bias": True, **changes}, dtype)
    theirs = decoder(config, arguments)
    if config.blocks["main"].norm_epsilon == NO_EPSILON:
        for module in theirs.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = NO_EPSILON
    error = difference(config, theirs, state, lambda theirs, tokens_BL: theirs(tokens_BL))
    parity("x-transformers", name, dtype, error)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_library_in_float32(name, parity):
    check(name, "float32", parity)


@pytest.mark.parametrize("name", [name for name in CASES if name not in IN_FLOAT32_ONLY])
def test_logits_equal_those_of_the_library_in_float64(name, parity, x64):
    check(name, "float64", parity)
