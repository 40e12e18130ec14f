"""config.json of old and new releases of `transformers`, and keys that depend on each other."""

import pytest

from tests.contracts.variants import change
from xfresearch.interop.config_json import read_model, write_config
from xfresearch.interop.exporting import choose
from xfresearch.interop.families import get_family
from xfresearch.interop.family import Unsupported

NEOX = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
OPT = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 20}
GPTJ = {"vocab_size": 31, "n_embd": 128, "n_layer": 2, "n_head": 1}
LLAMA = {**NEOX, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}


def read(name: str, config: dict):
    return read_model(get_family(name), config)


def rope(name: str, config: dict):
    return read(name, config).blocks["main"].attention.rope


@pytest.mark.parametrize(
    "name, hub, newer",
    [
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 300}, {"partial_rotary_factor": 0.5, "rope_theta": 300.0}),
        ("phi", {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25, "rope_theta": 1e4}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
         {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}),
    ],
)  # fmt: skip
def test_old_and_new_rope_keys_give_the_same_model(name, hub, newer):
    config = LLAMA if name == "llama" else NEOX
    result = rope(name, config | hub)
    assert result == rope(name, config | {"rope_parameters": newer}) != rope(name, config)


@pytest.mark.parametrize(
    "name, config, field, expected",
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
         "scaling", "linear"),
        ("phi", {"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.75}}, "fraction", 0.75),
    ],
)  # fmt: skip
def test_of_two_keys_the_one_that_transformers_reads_wins(name, config, field, expected):
    assert getattr(rope(name, (LLAMA if name == "llama" else NEOX) | config), field) == expected


def test_a_dropout_rate_is_written_as_it_was_read():
    config = LLAMA | {"attention_dropout": 0.3}
    assert write_config(get_family("llama"), read("llama", config))["attention_dropout"] == 0.3


def test_missing_rope_keys_have_the_defaults_of_transformers():
    assert rope("gpt_neox", NEOX).fraction == 0.25
    assert rope("phi", NEOX).fraction == 0.5
    assert rope("gptj", GPTJ).fraction == 64 / 128
    assert rope("mixtral", LLAMA).theta == 1e6


@pytest.mark.parametrize("truncate", [True, False])
def test_truncate_of_yarn_is_read_and_written(truncate):
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "truncate": truncate}
    model = read("llama", LLAMA | {"rope_scaling": scaling})
    assert model.blocks["main"].attention.rope.truncate is truncate
    assert write_config(get_family("llama"), model)["rope_scaling"].get("truncate", True) is truncate


def test_null_in_yarn_is_the_default_of_transformers():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    nulls = dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"))
    found = rope("llama", LLAMA | {"rope_scaling": scaling | nulls})
    assert found == rope("llama", LLAMA | {"rope_scaling": scaling})
    assert (found.high_frequency, found.low_frequency, found.attention_factor) == (32.0, 1.0, 0.0)


def test_opt_with_an_embedding_of_another_width_is_not_supported():
    assert read("opt", OPT | {"word_embed_proj_dim": 24}) == read("opt", OPT)
    assert write_config(get_family("opt"), read("opt", OPT))["word_embed_proj_dim"] == 24
    with pytest.raises(Unsupported, match="word_embed_proj_dim=12.* 24 for opt"):
        read("opt", OPT | {"word_embed_proj_dim": 12})


@pytest.mark.parametrize(
    "config, layout, final",
    [
        ({}, "pre_norm", "layer"),
        ({"_remove_final_layer_norm": True}, "pre_norm", "none"),
        ({"do_layer_norm_before": False}, "post_norm", "none"),
    ],
)
def test_two_keys_decide_whether_opt_has_a_final_norm(config, layout, final):
    model = read("opt", OPT | config)
    assert (model.blocks["main"].layout, model.final_norm) == (layout, final)
    assert read("opt", write_config(get_family("opt"), model)) == model


def test_gptj_cannot_express_another_theta():
    model = read("gptj", GPTJ)
    assert choose(model, "gptj").name == "gptj" and "rope_theta" not in write_config(get_family("gptj"), model)
    with pytest.raises(Unsupported, match="rope.theta=500.0"):
        choose(change(model, "blocks.main.attention.rope.theta", 500.0), "gptj")
