"""Which models a family can express, and for the others, which field prevents it."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import xfresearch as xf
from tests.contracts.variants import NAMED, choices, model, needed, random_params, tokens_for
from tests.daily import daily
from xfresearch.interop.config_json import write_config
from xfresearch.interop.differences import differences
from xfresearch.interop.exporting import choose
from xfresearch.interop.family import Unsupported
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.model_config import ModelConfig
from xfresearch.run_config.config import Config
from xfresearch.runtime.errors import UserError

# {named config, at its tiny size: the family that it is exported as, or the first field that no family can express}
OUTCOMES = {
    "all_attention": "layers.0.layout='all_attention'",
    "all_attention_enwik8_large": "layers.0.layout='all_attention'",
    "all_attention_enwik8_small": "layers.0.layout='all_attention'",
    "bert": "bert",
    "brody_majority": "layers.0.attention.bias=('output',)",
    "dyt": "embedding_scale='learned'",
    "gpt2": "gpt2",
    "gptj": "gptj",
    "lambda_lm": "layers.0.attention.kind='lambda'",
    "llama": "llama",
    "merged_query": "layers.0.attention.query='merged'",
    "mixtral_8x7b": "mixtral",
    "moe": "mixtral",
    "no_query": "layers.0.attention.query='identity'",
    "normless": "layers.0.layout='skipless_parallel'",
    "palm": "layers.0.layout='parallel'",
    "facts": "gpt_neox",
    "quickstart": "llama",
    "simplified": "layers.0.layout='skipless_parallel'",
    "single_head_deep": "layers.0.attention.head_size=8",
    "solu": "layers.0.feed_forward.kind='solu'",
    "vanilla_2017_decoder": "position='sinusoidal'",
    "variants": "layers.0.norm_bias=False",
}
EXPORTED = [name for name, outcome in OUTCOMES.items() if "=" not in outcome]


def test_every_named_config_has_an_outcome():
    assert set(OUTCOMES) == set(NAMED)


def error_of(config: ModelConfig, family: str = "") -> str:
    with pytest.raises(Unsupported) as error:
        choose(config, family)
    return str(error.value)


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_named_config_has_a_family_or_a_reason(name):
    if name in EXPORTED:
        assert choose(NAMED[name]).name == OUTCOMES[name]
    else:
        assert f" in {OUTCOMES[name]} (" in error_of(NAMED[name])


@pytest.mark.parametrize("name", daily(("gpt2", "mixtral_8x7b"), EXPORTED))
def test_an_exported_model_reads_back_as_the_same_model(name, tmp_path):
    config = NAMED[name]
    lm = LanguageModel(config, random_params(config), None, Config(model=config))
    lm.export_hf(tmp_path / "out")
    again = xf.load(tmp_path / "out")
    tokens_BL = tokens_for(config)
    assert jax.tree.structure(again.params) == jax.tree.structure(lm.params)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), again.params, lm.params)))
    np.testing.assert_array_equal(again(tokens_BL), lm(tokens_BL))


LLAMA, GPT_2, MIXTRAL = NAMED["llama"], NAMED["gpt2"], NAMED["mixtral_8x7b"]
BLOCK = "blocks.main."
ATTENTION_ONLY = {"layout": "attention_only"}
# {case: (model that a family can express, changes, the field that no family can express)}
UNSUPPORTED = {
    "memory slots": (LLAMA, {"attention.memory_slots": 16}, "attention.memory_slots=16"),
    "no feed-forward": (LLAMA, ATTENTION_ONLY, "layout='attention_only'"),
    "no W_Q": (LLAMA, {"attention.query": "identity"}, "attention.query='identity'"),
    "values are keys": (LLAMA, {"attention.value": "key"}, "attention.value='key'"),
    "no W_O": (LLAMA, {"attention.output": "identity"}, "attention.output='identity'"),
    "SoLU": (GPT_2, {"feed_forward.kind": "solu"}, "feed_forward.kind='solu'"),
    "DyT": (LLAMA, {"norm": "dyt"}, "norms.attention_in='dyt'"),
    "Derf": (LLAMA, {"norm": "derf"}, "norms.attention_in='derf'"),
    "projection": (GPT_2, {"norms.feed_forward_in.kind": "project"}, "norms.feed_forward_in='project'"),
    "no skip": (LLAMA, {"layout": "no_skip"}, "layout='no_skip'"),
    "parallel Llama": (LLAMA, {"layout": "parallel"}, "layout='parallel'"),
    "T5's position bias": (LLAMA, {"attention.position": "t5"}, "attention.position='t5'"),
    "ALiBi": (GPT_2, {"attention.position": "alibi"}, "attention.position='alibi'"),
    "skip-init": (GPT_2, {"attention.shaping": "skip_init"}, "attention.shaping='skip_init'"),
    "adaptive span": (GPT_2, {"attention.span": "adaptive"}, "attention.span='adaptive'"),
    "shared expert": (MIXTRAL, {"feed_forward.moe.shared": 1}, "feed_forward.moe.shared=1"),
    "capacity": (MIXTRAL, {"feed_forward.moe.capacity": 2.0}, "feed_forward.moe.capacity=2.0"),
    "sigmoid scores": (MIXTRAL, {"feed_forward.moe.scores": "sigmoid"}, "feed_forward.moe.scores='sigmoid'"),
    "balance by a bias": (MIXTRAL, {"feed_forward.moe.balance": "bias"}, "feed_forward.moe.router_bias=True"),
}


GEMMA = {"embedding_scale": "sqrt_width", "norm_offset": 1.0, "feed_forward.kind": "geglu_tanh"}
NO_GAIN = {"final_norm": "layer", "norm": "layer", "norm_gain": False, "norm_epsilon": 1e-5}
OVER_HEADS = {"attention.qk_norm": "rms", "attention.qk_norm_over": "heads"}
# (model, changes, the family of the changed model)
CHOSEN = [
    (LLAMA, {"attention.window": 5}, "mistral"),
    (MIXTRAL, {"attention.window": 5, "feed_forward.moe.expert": "geglu"}, "mixtral"),
    (LLAMA, {"attention.bias": ("query", "key", "value")}, "qwen2"),
    (LLAMA, {"attention.qk_norm": "rms", "attention.head_size": 6}, "qwen3"),
    (LLAMA, {**NO_GAIN, "attention.clip": 0.5}, "olmo"),
    (LLAMA, {**OVER_HEADS, "layout": "output_norm"}, "olmo2"),
    (MIXTRAL, {**OVER_HEADS, "feed_forward.moe.renormalise": False, "attention.clip": 0.5}, "olmoe"),
    (LLAMA, GEMMA, "gemma"),
    (LLAMA, {**GEMMA, "layout": "peri_norm", "logit_softcap": 3.0, "attention.softcap": 2.0}, "gemma2"),
    (LLAMA, {**GEMMA, "layout": "sandwich_norm", "attention.scale": 0.5}, "gemma2"),
]


def with_changes(base: ModelConfig, changes: dict) -> ModelConfig:
    """`base` with changes to fields of the model or, if it has no such field, of its block."""
    return model({path if hasattr(base, path) else BLOCK + path: value for path, value in changes.items()}, base)


@pytest.mark.parametrize("base, changes, name", CHOSEN, ids=[case[2] for case in CHOSEN])
def test_a_variant_is_expressed_by_its_family(base, changes, name):
    assert choose(with_changes(base, changes)).name == name


@pytest.mark.parametrize("scale, written", [(0.0, 8), (0.5, 4), (1 / 17**0.5, 17)])
def test_an_attention_scale_is_written_as_its_inverse_square(scale, written):
    config = with_changes(LLAMA, {**GEMMA, "layout": "peri_norm", "attention.scale": scale})
    assert write_config(choose(config), config)["query_pre_attn_scalar"] == written


def test_a_scale_that_is_not_an_inverse_root_is_not_supported():
    config = with_changes(LLAMA, {**GEMMA, "layout": "peri_norm", "attention.scale": 0.3})
    assert "layers.0.attention.scale=0.3 (the family has " in error_of(config)


@pytest.mark.parametrize("base, changes, reason", [pytest.param(*case, id=name) for name, case in UNSUPPORTED.items()])
def test_an_unsupported_variant_names_the_field(base, changes, reason):
    choose(base)
    message = error_of(with_changes(base, changes))
    assert f" in layers.0.{reason} (" in message and "\n" not in message


def test_the_layer_that_differs_is_named():
    odd = replace(LLAMA.blocks["main"], feed_forward=replace(LLAMA.blocks["main"].feed_forward, kind="geglu"))
    mixed = replace(LLAMA, blocks={"main": LLAMA.blocks["main"], "odd": odd}, pattern=("main", "odd"))
    assert "layers.1.feed_forward.kind='geglu' (the family has 'swiglu')" in error_of(mixed)


def test_a_given_family_that_does_not_fit_names_the_field():
    assert error_of(MIXTRAL, "llama").startswith(
        "llama cannot express this model: it differs from llama in layers.0.feed_forward."
    )
    assert choose(LLAMA, "mistral").name == "mistral"
    with pytest.raises(UserError, match="model_type='lama'.*did you mean 'llama'"):
        choose(LLAMA, "lama")


def test_the_dtype_of_computation_does_not_affect_the_family():
    assert choose(replace(LLAMA, dtype="bfloat16")).name == "llama"


# A loss in training, and a size of the scan.
SAME_FUNCTION = [
    (BLOCK + "feed_forward[moe].moe.balance", "none"),
    (BLOCK + "attention[lambda].lambdas.chunk", 3),
]
ONLY_FOR_THE_CHOICE = ("rope.original_length", "span_ramp")  # options that are not read without it


@pytest.mark.parametrize("path, value", [(path, value) for path, values in choices().items() for value in values])
def test_every_choice_that_changes_a_model_is_a_difference(path, value):
    more = needed(path, value)
    without = {name: v for name, v in more.items() if not name.endswith(ONLY_FOR_THE_CHOICE)}
    changed = model({path: value, **more})
    unchanged = model(without)
    same_function = (path, value) in SAME_FUNCTION
    assert bool(differences(changed, unchanged)) == (not same_function)
    assert not differences(changed, changed)
