"""Models of `transformers` that no family of interop/ supports: the same weights give the same logits.

BLOOM's ALiBi adds slope times the key's position; for a softmax, this is equivalent to minus slope times the distance.
"""

import numpy as np
import pytest

from tests.parity.weights import DEPTH, HEADS, MISSING, WIDTH, config_of, difference, layers_of, matrix
from xfresearch.models.mixers.softmax.logit_bias import t5_bucket
from xfresearch.models.mixers.softmax.options import PROJECTIONS

torch = pytest.importorskip("torch", reason=MISSING.format("torch"))
transformers = pytest.importorskip("transformers", reason=MISSING.format("transformers"))

pytestmark = pytest.mark.parity


def bloom(config, params) -> dict:
    tensors = {"transformer.word_embeddings.weight": params["embed"]["table"]}
    tensors |= affine("transformer.word_embeddings_layernorm", params["embedding_norm"])
    tensors |= affine("transformer.ln_f", params["final_norm"])
    for i, p in enumerate(layers_of(params)):
        tensors |= layer(f"transformer.h.{i}", p)
    return tensors


def layer(name: str, p: dict) -> dict:
    """In the QKV matrix, each head's query, key and value are adjacent."""
    a = p["attention"]
    f = p["feed_forward"]
    qkv = {x: np.stack([a[part][x] for part in ("query", "key", "value")], -2) for x in ("kernel", "bias")}
    tensors = affine(f"{name}.input_layernorm", p["attention_norm_in"])
    tensors |= affine(f"{name}.post_attention_layernorm", p["feed_forward_norm_in"])
    tensors |= linear(f"{name}.self_attention.query_key_value", qkv)
    tensors |= linear(f"{name}.self_attention.dense", a["output"], inputs=2)
    return tensors | linear(f"{name}.mlp.dense_h_to_4h", f["up"]) | linear(f"{name}.mlp.dense_4h_to_h", f["down"])


def linear(name: str, p: dict, inputs: int = 1) -> dict:
    return {f"{name}.weight": matrix(p["kernel"], inputs), f"{name}.bias": p["bias"].reshape(-1)}


def affine(name: str, p: dict) -> dict:
    return {f"{name}.weight": p["gain"], f"{name}.bias": p["bias"]}


OURS = {
    **{"norm_bias": True, "attention.bias": PROJECTIONS, "attention.position": "alibi", "embedding_norm": "layer"},
    **{"feed_forward.bias": True, "feed_forward.kind": "gelu_tanh", "feed_forward.hidden": 4 * WIDTH},
    "tie_embeddings": True,
}
THEIRS = {"vocab_size": 64, "hidden_size": WIDTH, "n_layer": DEPTH, "n_head": HEADS, "bos_token_id": None,
          "eos_token_id": None, "attn_implementation": "eager"}  # fmt: skip


def test_logits_of_bloom_equal_those_of_transformers(parity):
    """In float32 only, because the constant in its GELU has eight digits."""
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.BloomConfig(**THEIRS))
    run = lambda module, tokens_BL: module(tokens_BL, use_cache=False).logits  # noqa: E731
    parity("transformers", "BLOOM, ALiBi", "float32", difference(config_of(OURS, "float32"), theirs, bloom, run))


def test_t5_buckets_equal_those_of_transformers():
    """At T5's own sizes: the sequences of test_x_transformers.py are too short for several distances per bucket."""
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(300)
    theirs = T5Attention._relative_position_bucket(torch.from_numpy(-distances), False, 32, 128)
    assert np.array_equal(t5_bucket(distances, 32, 128), theirs.numpy())
