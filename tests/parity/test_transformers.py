"""Whole models against Hugging Face transformers: the same weights, the same logits.

What the library does otherwise than the equations, and the weights that take it up:
- GPT-J turns neighbouring dimensions of a head; its head has a bias, which is 0 here;
- BLOOM adds ALiBi's slope times the key's position, which a softmax does not tell from minus the distance;
- Mixtral normalises the k largest of a softmax over all experts, which is the softmax over the k largest logits.
RMSNorm, RoPE and most softmaxes are float32 there whatever the model's dtype: only GPT-2 can be compared in float64.
"""

import numpy as np
import pytest

from tests.parity.weights import (
    DEPTH,
    HEADS,
    HIDDEN,
    LENGTH,
    MISSING,
    SIZE,
    WIDTH,
    config_of,
    difference,
    layers_of,
    matrix,
    paired,
)
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.config import RopeConfig
from xfresearch.models.positions import attention_factor, rope_frequencies, t5_bucket

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))
pytestmark = pytest.mark.parity


def llama(config, params) -> dict:
    """Llama, and Mistral, Mixtral and Qwen3, which keep Llama's names and add to them."""
    found = {"model.embed_tokens.weight": params["embed"]["table"], "model.norm.weight": params["final_norm"]["gain"]}
    found["lm_head.weight"] = params["head"]["table"]
    for i, p in enumerate(layers_of(params)):
        a, f, place = p["attention"], p["feed_forward"], f"model.layers.{i}"
        found[f"{place}.input_layernorm.weight"] = p["attention_norm_in"]["gain"]
        found[f"{place}.post_attention_layernorm.weight"] = p["feed_forward_norm_in"]["gain"]
        found |= {f"{place}.self_attn.{x[0]}_proj.weight": matrix(a[x]["kernel"]) for x in ("query", "key", "value")}
        found[f"{place}.self_attn.o_proj.weight"] = matrix(a["output"]["kernel"], inputs=2)
        found |= {f"{place}.self_attn.{x[0]}_norm.weight": a[x]["gain"] for x in ("query_norm", "key_norm") if x in a}
        found |= experts(f, place) if "experts" in f else {
            f"{place}.mlp.{x}_proj.weight": matrix(f[x]["kernel"]) for x in ("gate", "up", "down")}  # fmt: skip
    return found


def experts(f: dict, place: str) -> dict:
    kernels = {name: kernel.swapaxes(1, 2) for name, kernel in f["experts"].items()}
    return {
        f"{place}.mlp.gate.weight": matrix(f["router"]["kernel"]),
        f"{place}.mlp.experts.gate_up_proj": np.concatenate([kernels["gate"], kernels["up"]], 1),
        f"{place}.mlp.experts.down_proj": kernels["down"],
    }


def gpt2(config, params) -> dict:
    found = {"transformer.wte.weight": params["embed"]["table"], "transformer.wpe.weight": params["position"]["table"]}
    found |= affine("transformer.ln_f", params["final_norm"])
    for i, p in enumerate(layers_of(params)):
        place, a, f = f"transformer.h.{i}", p["attention"], p["feed_forward"]
        found |= affine(f"{place}.ln_1", p["attention_norm_in"]) | affine(f"{place}.ln_2", p["feed_forward_norm_in"])
        parts = [linear("", a[name]) for name in ("query", "key", "value")]
        qkv = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        linears = {f"{place}.attn.c_attn{name}": value for name, value in qkv.items()}
        linears |= linear(f"{place}.attn.c_proj", a["output"], inputs=2)
        linears |= linear(f"{place}.mlp.c_fc", f["up"]) | linear(f"{place}.mlp.c_proj", f["down"])
        found |= {name: value.T for name, value in linears.items()}  # its matrices are [inputs, outputs]
    return found


def gptj(config, params) -> dict:
    fraction = config.blocks["main"].attention.rope.fraction
    found = {"transformer.wte.weight": params["embed"]["table"], "lm_head.weight": params["head"]["table"]}
    found |= affine("transformer.ln_f", params["final_norm"]) | {"lm_head.bias": np.zeros(config.vocab_size)}
    for i, p in enumerate(layers_of(params)):
        place, a, f = f"transformer.h.{i}", p["attention"], p["feed_forward"]
        found |= affine(f"{place}.ln_1", p["attention_norm_in"])
        found[f"{place}.attn.q_proj.weight"] = matrix(paired(a["query"]["kernel"], fraction))
        found[f"{place}.attn.k_proj.weight"] = matrix(paired(a["key"]["kernel"], fraction))
        found[f"{place}.attn.v_proj.weight"] = matrix(a["value"]["kernel"])
        found[f"{place}.attn.out_proj.weight"] = matrix(a["output"]["kernel"], inputs=2)
        found |= linear(f"{place}.mlp.fc_in", f["up"]) | linear(f"{place}.mlp.fc_out", f["down"])
    return found


def neox(config, params) -> dict:
    found = {"gpt_neox.embed_in.weight": params["embed"]["table"], "lm_head.weight": params["head"]["table"]}
    found |= affine("gpt_neox.final_layer_norm", params["final_norm"])
    for i, p in enumerate(layers_of(params)):
        found |= fused_layer(f"gpt_neox.layers.{i}", "attention", p)
    return found


def bloom(config, params) -> dict:
    found = {"transformer.word_embeddings.weight": params["embed"]["table"]}
    found |= affine("transformer.word_embeddings_layernorm", params["embedding_norm"])
    found |= affine("transformer.ln_f", params["final_norm"])
    for i, p in enumerate(layers_of(params)):
        found |= fused_layer(f"transformer.h.{i}", "self_attention", p)
    return found


def fused_layer(place: str, attention: str, p: dict) -> dict:
    """GPT-NeoX's and BLOOM's layer: one matrix with each head's query, key and value next to each other."""
    a, f = p["attention"], p["feed_forward"]
    qkv = {x: np.stack([a[name][x] for name in ("query", "key", "value")], -2) for x in ("kernel", "bias")}
    found = affine(f"{place}.input_layernorm", p["attention_norm_in"])
    found |= affine(f"{place}.post_attention_layernorm", p["feed_forward_norm_in"])
    found |= linear(f"{place}.{attention}.query_key_value", qkv)
    found |= linear(f"{place}.{attention}.dense", a["output"], inputs=2)
    return found | linear(f"{place}.mlp.dense_h_to_4h", f["up"]) | linear(f"{place}.mlp.dense_4h_to_h", f["down"])


def linear(place: str, p: dict, inputs: int = 1) -> dict:
    return {f"{place}.weight": matrix(p["kernel"], inputs), f"{place}.bias": p["bias"].reshape(-1)}


def affine(place: str, p: dict) -> dict:
    return {f"{place}.weight": p["gain"], f"{place}.bias": p["bias"]}


ROPE = {"attention.position": "rope"}
LLAMA = {"norm": "rms", "final_norm": "rms", "feed_forward.kind": "swiglu", **ROPE}
BIASED = {"norm_bias": True, "feed_forward.bias": True, "feed_forward.kind": "gelu_tanh"}
# Of 4 frequencies over 128 tokens, the first is kept, the second blended, the others divided.
SCALED = {"attention.rope.scaling": "llama3", "attention.rope.original_length": 128, "attention.rope.factor": 4.0}
THEIR_SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 128}  # fmt: skip
THEIRS = {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
          "intermediate_size": HIDDEN, "max_position_embeddings": LENGTH, "bos_token_id": None, "eos_token_id": None,
          "tie_word_embeddings": False, "attn_implementation": "eager"}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
UNSCALED = {"rope_type": "default", "rope_theta": 1e4}
LLAMAS = {"num_key_value_heads": HEADS, "rms_norm_eps": 1e-5, "rope_parameters": UNSCALED}
GROUPED, ONE_KEY = {**LLAMAS, "num_key_value_heads": 2}, {**LLAMAS, "num_key_value_heads": 1}
# {what: (changes of our config, name of their config's class, its arguments, our parameters under their names)}
CASES = {
    "Llama": (LLAMA, "LlamaConfig", LLAMAS, llama),
    "Llama, grouped queries": ({**LLAMA, "attention.kv_heads": 2}, "LlamaConfig", GROUPED, llama),
    "Llama, multi-query": ({**LLAMA, "attention.kv_heads": 1}, "LlamaConfig", ONE_KEY, llama),
    "Llama 3's stretched RoPE": (
        {**LLAMA, **SCALED, "attention.kv_heads": 2},
        "LlamaConfig",
        {**GROUPED, "rope_parameters": THEIR_SCALED, "max_position_embeddings": 512},
        llama,
    ),
    "Llama, linearly stretched RoPE": (
        {**LLAMA, "attention.rope.scaling": "linear", "attention.rope.factor": 4.0, "attention.rope.theta": 500.0},
        "LlamaConfig",
        {**LLAMAS, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        llama,
    ),
    "Llama, YaRN": (
        {**LLAMA, **SCALED, "attention.rope.scaling": "yarn", "attention.rope.high_frequency": 32.0},
        "LlamaConfig",
        {**LLAMAS, "rope_parameters": {**YARN, "original_max_position_embeddings": 128}},
        llama,
    ),
    "Mistral, window": (
        {**LLAMA, "attention.kv_heads": 2, "attention.window": 5},
        "MistralConfig",
        {**GROUPED, "head_dim": SIZE, "sliding_window": 5},
        llama,
    ),
    "Qwen3, query-key norm": (
        {**LLAMA, "attention.kv_heads": 2, "attention.qk_norm": "rms"},
        "Qwen3Config",
        {**GROUPED, "head_dim": SIZE},
        llama,
    ),
    "Mixtral, 2 of 8 experts": (
        {**LLAMA, "attention.kv_heads": 2, "feed_forward.kind": "moe"},
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2},
        llama,
    ),
    "GPT-2": (
        {**BIASED, "attention.bias": True, "position": "learned", "tie_embeddings": True},
        "GPT2Config",
        {"n_inner": HIDDEN, "tie_word_embeddings": True},
        gpt2,
    ),
    "GPT-J, parallel": (
        {**BIASED, **ROPE, "layout": "parallel", "attention.rope.fraction": 0.5},
        "GPTJConfig",
        {"n_inner": HIDDEN, "rotary_dim": SIZE // 2},
        gptj,
    ),
    "GPT-NeoX, parallel with two norms": (
        {**BIASED, **ROPE, "layout": "parallel_two_norms", "feed_forward.kind": "gelu", "attention.bias": True}
        | {"attention.rope.fraction": 0.5},
        "GPTNeoXConfig",
        {"rope_parameters": {**UNSCALED, "partial_rotary_factor": 0.5}},
        neox,
    ),
    "BLOOM, ALiBi": (
        {**BIASED, "attention.bias": True, "attention.position": "alibi", "embedding_norm": "layer"}
        | {"tie_embeddings": True, "feed_forward.hidden": 4 * WIDTH},
        "BloomConfig",
        {"tie_word_embeddings": True},
        bloom,
    ),
}


def check(name: str, dtype: str, parity):
    changes, kind, arguments, state = CASES[name]
    config = config_of(changes, dtype)
    theirs = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**THEIRS | arguments))
    error = difference(config, theirs, state, lambda module, tokens_BL: module(tokens_BL, use_cache=False).logits)
    parity("transformers", name, dtype, error)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs_in_float32(name, parity):
    check(name, "float32", parity)


def test_logits_are_theirs_in_float64(parity, x64):
    check("GPT-2", "float64", parity)


MORE = {"beta_fast": 40.0, "beta_slow": 2.0, "attention_factor": 0.9}


@pytest.mark.parametrize("size, original, more", [(64, 4096, {}), (8, 128, {}), (6, 3, {}), (128, 32768, MORE)])
def test_frequencies_of_yarn_are_theirs(size, original, more):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours = RopeConfig(
        scaling="yarn",
        factor=4.0,
        original_length=original,
        low_frequency=more.get("beta_slow", 1.0),
        high_frequency=more.get("beta_fast", 32.0),
        attention_factor=more.get("attention_factor", 0.0),
    )
    parameters = {**YARN, **more, "original_max_position_embeddings": original}
    theirs = transformers.LlamaConfig(head_dim=size, rope_parameters=parameters, max_position_embeddings=4 * original)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    assert relative_error(rope_frequencies(ours, size), frequencies.numpy()) < TOLERANCE["float32"]
    assert attention_factor(ours) == pytest.approx(factor, rel=1e-12)


def test_t5_buckets_are_theirs_at_its_own_sizes():
    """The whole models of test_x_transformers.py are too short for distances that share one of 32 buckets."""
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(300)
    theirs = T5Attention._relative_position_bucket(torch.from_numpy(-distances), False, 32, 128)
    assert np.array_equal(t5_bucket(distances, 32, 128), theirs.numpy())
