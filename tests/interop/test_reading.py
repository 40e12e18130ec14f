"""Reading config.json: keys that are missing, null, from an older release of `transformers`, or not supported."""

from dataclasses import replace

import pytest

from tests.interop import published as hub
from xfresearch.interop.config_json import read_model, value_at
from xfresearch.interop.families import get_family
from xfresearch.interop.family import Unsupported


def changed(config: dict, changes: dict) -> dict:
    """`config` with `changes`; a key whose value is ... is removed."""
    return {key: value for key, value in (config | changes).items() if value is not ...}


def read(config: dict, **changes):
    config = changed(config, changes)
    return read_model(get_family(config["model_type"]), config)


def windows(model) -> list[int]:
    blocks = [model.blocks[name].attention.window for name in model.pattern]
    return blocks * (model.depth // len(blocks))


LLAMA_LIKE = (hub.LLAMA_2, hub.MISTRAL, hub.MIXTRAL, hub.QWEN2, hub.QWEN3, hub.OLMO, hub.OLMO_2, hub.OLMOE)
LLAMA_LIKE += (hub.GEMMA, hub.GEMMA_2)
FULL = "full_attention"
SLIDING = "sliding_attention"


# (config.json, changed keys, the window of each layer); tests/parity/test_published.py compares it with `transformers`.
WINDOWS = [
    (hub.MISTRAL, {}, [4096] * 32),
    (hub.MISTRAL, {"sliding_window": ...}, [4096] * 32),
    (hub.MISTRAL, {"sliding_window": None}, [0] * 32),
    (hub.MIXTRAL, {}, [0] * 32),
    (hub.MIXTRAL, {"sliding_window": ...}, [0] * 32),
    (hub.MIXTRAL, {"sliding_window": 7}, [7] * 32),
    (hub.QWEN2, {"max_window_layers": 20}, [0] * 24),
    (hub.QWEN2, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 22}, [0] * 22 + [7] * 2),
    (hub.QWEN2, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": ...}, [0] * 24),
    (hub.QWEN2, {"use_sliding_window": True, "sliding_window": ..., "max_window_layers": 23}, [0] * 23 + [4096]),
    (hub.QWEN2, {"use_sliding_window": False, "sliding_window": 7, "layer_types": [SLIDING] * 24}, [0] * 24),
    (
        hub.QWEN3,
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDING, FULL, FULL, FULL] * 7},
        [7, 0, 0, 0] * 7,
    ),
    (hub.GEMMA_2, {}, [4096, 0] * 13),
    (hub.GEMMA_2, {"sliding_window": ...}, [4096, 0] * 13),
    (hub.GEMMA_2, {"layer_types": [FULL, SLIDING] * 13, "sliding_window": 5}, [0, 5] * 13),
    (hub.GEMMA_2, {"num_hidden_layers": 3}, [4096, 0, 4096]),
]


@pytest.mark.parametrize("config, changes, expected", WINDOWS)
def test_windows(config, changes, expected):
    assert windows(read(config, **changes)) == expected


@pytest.mark.parametrize(
    "config, changes, field, expected",
    [
        (hub.GEMMA_2, {"final_logit_softcapping": ...}, "logit_softcap", 30.0),
        (hub.GEMMA_2, {"final_logit_softcapping": None}, "logit_softcap", 0.0),
        (hub.GEMMA_2, {"attn_logit_softcapping": ...}, "*.attention.softcap", 50.0),
        (hub.GEMMA_2, {"attn_logit_softcapping": None}, "*.attention.softcap", 0.0),
        (hub.GEMMA_2, {"query_pre_attn_scalar": ...}, "*.attention.scale", 1 / 16),
        (hub.GEMMA_2, {"query_pre_attn_scalar": 144}, "*.attention.scale", 1 / 12),
        (hub.GEMMA_2, {"hidden_activation": "gelu"}, "*.feed_forward.kind", "geglu"),
        (hub.GEMMA, {}, "*.feed_forward.kind", "geglu_tanh"),
        (hub.GEMMA, {"hidden_activation": "gelu_pytorch_tanh"}, "*.feed_forward.kind", "geglu_tanh"),
        (hub.GEMMA, {"hidden_act": ...}, "*.feed_forward.kind", "geglu_tanh"),
        (hub.GEMMA, {}, "tie_embeddings", True),
        (hub.GEMMA, {"head_dim": ...}, "*.attention.head_size", 256),
        (hub.QWEN3, {"head_dim": ...}, "*.attention.head_size", 128),
        (hub.MISTRAL, {"head_dim": 96}, "*.attention.head_size", 96),
        (hub.MISTRAL, {"rms_norm_eps": ...}, "*.norm_epsilon", 1e-6),
        (hub.MIXTRAL, {"rms_norm_eps": ...}, "*.norm_epsilon", 1e-5),
        (hub.MISTRAL, {"rope_theta": ...}, "*.attention.rope.theta", 1e4),
        (hub.MIXTRAL, {"rope_theta": ...}, "*.attention.rope.theta", 1e6),
        (hub.MIXTRAL, {"rope_theta": ..., "rope_parameters": {"rope_theta": 7.0}}, "*.attention.rope.theta", 7.0),
        (hub.OLMOE, {"norm_topk_prob": ...}, "*.feed_forward.moe.renormalise", False),
        (hub.MIXTRAL, {}, "*.feed_forward.moe.renormalise", True),
        (hub.OLMO, {"clip_qkv": 8.0}, "*.attention.clip", 8.0),
        (hub.OLMO, {}, "*.norm_epsilon", 1e-5),
        *((config, {"attention_dropout": 0.25}, "*.attention.dropout", 0.25) for config in LLAMA_LIKE),
        *((config, {"attention_dropout": ...}, "*.attention.dropout", 0.0) for config in LLAMA_LIKE),
        (hub.LLAMA_3_1, {"num_key_value_heads": ...}, "*.attention.kv_heads", 32),
        (hub.MISTRAL, {"num_key_value_heads": ...}, "*.attention.kv_heads", 8),
        (hub.MISTRAL, {"num_key_value_heads": None}, "*.attention.kv_heads", 32),
        (hub.MIXTRAL, {"num_key_value_heads": ...}, "*.attention.kv_heads", 8),
        (hub.QWEN2, {"num_key_value_heads": ..., "num_attention_heads": 64}, "*.attention.kv_heads", 32),
        (hub.QWEN3, {"num_key_value_heads": ..., "num_attention_heads": 64}, "*.attention.kv_heads", 32),
        (hub.GEMMA, {"num_key_value_heads": ..., "num_attention_heads": 32}, "*.attention.kv_heads", 16),
        (hub.GEMMA_2, {"num_key_value_heads": ..., "num_attention_heads": 8}, "*.attention.kv_heads", 4),
        (hub.OLMO_2, {"num_key_value_heads": ...}, "*.attention.kv_heads", 32),
    ],
)
def test_a_key_sets_a_field(config, changes, field, expected):
    assert value_at(read(config, **changes), field) == expected


@pytest.mark.parametrize(
    "config, changes, reason",
    [
        (hub.GEMMA, {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (hub.GEMMA, {"hidden_act": "relu"}, "hidden_act='relu'.*'gelu', 'gelu_pytorch_tanh'"),
        (hub.GEMMA_2, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (hub.GEMMA_2, {"layer_types": [FULL, "chunked_attention"] * 13}, "layer_types has 'chunked_attention'"),
        (hub.QWEN3, {"layer_types": [FULL]}, "layer_types has 1 types for 28 layers"),
        (hub.MIXTRAL, {"hidden_act": "tanh"}, "hidden_act='tanh'"),
        (hub.MISTRAL, {"hidden_size": ...}, "hidden_size is missing"),
        (hub.MISTRAL, {"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        (hub.QWEN2, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (hub.QWEN2, {"max_window_layers": None}, "max_window_layers=None.* an integer"),
        (
            hub.MISTRAL,
            {"sliding_window": "a"},
            "sliding_window='a'.* an integer of at least 0",
        ),
        (hub.MISTRAL, {"sliding_window": -3}, "sliding_window=-3.* an integer of at least 0"),
        (hub.GEMMA_2, {"layer_types": 5}, "layer_types=5 has the wrong type: it must be a list"),
        (
            hub.GEMMA_2,
            {"layer_types": [[FULL], 3] * 13},
            r"layer_types has \['full_attention'\]: each layer must have one of",
        ),
        (hub.GEMMA_2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0.* above 0"),
        (hub.GEMMA_2, {"query_pre_attn_scalar": "a"}, "query_pre_attn_scalar='a' has the wrong type: it must be a num"),
        (hub.GPT_J, {"rotary_dim": "a"}, "rotary_dim='a'.* an integer of at least 0"),
        (hub.GPT_J, {"rotary_dim": 63}, "config.json: rotary_dim over the size of a head=0.246.* an even number"),
        (hub.PHI, {"partial_rotary_factor": 0.01}, "config.json: partial_rotary_factor=0.01"),
        (hub.MISTRAL, {"head_dim": 7}, "config.json: head_dim=7 is not allowed: it must be even"),
        (hub.OLMOE, {"num_attention_heads": 2048}, "json: hidden_size / num_attention_heads=1 is not .* even"),
        (hub.QWEN2, {"is_causal": False}, "is_causal=False is not allowed"),
        (hub.GPT_2, {"is_causal": None}, "is_causal=None is not allowed"),
    ],
)
def test_unsupported_values_are_errors_that_name_the_key(config, changes, reason):
    with pytest.raises(Unsupported, match=reason):
        read(config, **changes)


def test_a_bug_in_a_family_is_not_reported_as_a_user_error():
    def broken(config):
        return config["vocab_size"] + "a"

    with pytest.raises(TypeError):
        read_model(replace(get_family("llama"), derived=broken), hub.LLAMA_2)
