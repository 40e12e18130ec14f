"""What a Hugging Face folder holds that is not read, or that nobody wants to read, is said by its name."""

import shutil

import numpy as np
import pytest

import xfresearch as xf
from tests.interop.edits import UP, WEIGHTS, edit_config, edit_tensors
from tests.interop.published import LLAMA_2, MIXTRAL, OLMOE, PYTHIA
from tests.interop.published_2025 import GEMMA_3, GPT_NEO, OLMO_3
from tests.interop.record import RECORDED
from xfresearch import convert
from xfresearch.interop.config_json import read_model
from xfresearch.interop.families import all_families, family_of
from xfresearch.interop.family import Unsupported
from xfresearch.interop.folder import INDEX
from xfresearch.interop.unread import unread_keys


def read(config: dict, **changes):
    return read_model(family_of(config), config | changes)


def rope(config: dict, **changes):
    return next(iter(read(config, **changes).blocks.values())).attention.rope


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_refused_unless_they_are_allowed(folder, dtype, value, capsys):
    from ml_dtypes import bfloat16

    def damage(tensors):
        tensors[UP] = tensors[UP].astype(bfloat16 if dtype == "bfloat16" else dtype)
        tensors[UP][-1, -2:] = value

    edit_tensors(folder, damage)
    said = f"{folder / WEIGHTS}: tensor {UP} has 2 values that are NaN or infinite"
    with pytest.raises(xf.UserError, match="--allow-nonfinite") as caught:
        xf.load(folder)
    assert str(caught.value).startswith(said)
    assert np.isnan(np.asarray(xf.load(folder, allow_nonfinite=True)([[1, 2]]))).any()
    assert f"warning: {said}\n" in capsys.readouterr().err


def test_import_goes_on_with_allow_nonfinite(folder, tmp_path, capsys):
    edit_tensors(folder, lambda tensors: tensors[UP].__setitem__((0, 0), np.nan))
    convert.main(["import", str(folder), str(tmp_path / "run"), "--allow-nonfinite"])
    assert "1 values that are NaN" in capsys.readouterr().err
    assert np.isnan(np.asarray(xf.load(tmp_path / "run")([[1]]))).any()


def test_shards_without_an_index_are_read_if_all_are_there(sharded, whole, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "m")
    (folder / INDEX).unlink()
    tokens_BL = [[1, 2, 3]]
    assert np.array_equal(xf.load(folder)(tokens_BL), xf.load(whole)(tokens_BL))
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(xf.UserError, match=f"{gone.name} is missing, and there is no {INDEX}"):
        xf.load(folder)


def test_weights_under_another_name_are_named(folder):
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    with pytest.raises(xf.UserError, match="such as consolidated.safetensors, are not those of a model's weights"):
        xf.load(folder)


def test_keys_that_nothing_reads_are_named(folder, capsys):
    edit_config(folder, attention_sinks=4, use_cache=False)
    xf.load(folder)
    assert "warning: config.json: attention_sinks: not read, here or by transformers\n" in capsys.readouterr().err


def test_an_unknown_family_has_no_hint_that_misleads():
    with pytest.raises(Unsupported) as caught:
        read(LLAMA_2 | {"model_type": "mamba", "state_size": 16})
    text = str(caught.value)
    assert "families are gpt2, " in text and text.endswith("no family reads the keys state_size")
    assert "did you mean" not in text


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.iterdir() if (path / WEIGHTS).exists()))
def test_without_a_model_type_the_family_of_the_tensors_is_named(name, tmp_path):
    folder = shutil.copytree(RECORDED / name, tmp_path / "m")
    edit_config(folder, model_type=None, architectures=None)
    with pytest.raises(xf.UserError) as caught:
        xf.load(folder)
    fits = f'its tensors have the names of {name}: add "model_type": "{name}"'
    assert str(caught.value) == f"{folder}: config.json: model_type is missing, as in files of 2019: {fits}"
    edit_config(folder, model_type=name)
    xf.load(folder)


def test_without_a_model_type_names_of_2018_and_without_a_prefix_are_recognised():
    bert = ["embeddings.LayerNorm.gamma", "encoder.layer.0.attention.output.LayerNorm.beta", "pooler.dense.bias"]
    for tensors, family in ((bert, "bert"), (["wte.weight", "h.0.attn.c_attn.weight", "h.0.attn.bias"], "gpt2")):
        with pytest.raises(Unsupported, match=f"names of {family}: add"):
            family_of({}, lambda tensors=tensors: tensors)
    with pytest.raises(Unsupported, match="it must be one of gpt2, "):
        family_of({}, lambda: ["a.weight"])


def test_every_key_that_a_family_writes_is_one_that_it_reads():
    for family in all_families():
        written = {key.theirs for key in family.keys} | {*family.needs, *family.same}
        assert not unread_keys(dict.fromkeys(written), family.reads)


@pytest.mark.parametrize(
    "config, changes, error",
    [
        (LLAMA_2, {"rope_theta": 0}, "rope_theta=0"),
        (LLAMA_2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not allowed: it must be 1"),
        (GEMMA_3, {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0 is not allowed"),
        (GEMMA_3, {"rope_parameters": {"rope_theta": 1e4}}, "an object for each type of layer"),
        (PYTHIA, {"rotary_pct": "a"}, "rotary_pct='a' has the wrong type"),
        (GPT_NEO, {"attention_layers": ["local"] * 12}, "attention_layers=.* attention_types says"),
    ],
)
def test_a_value_that_is_not_obeyed_is_refused(config, changes, error):
    with pytest.raises(Unsupported, match=error):
        read(config, **changes)


def test_the_layers_of_gpt_neo_may_stand_alone():
    alone = {"attention_layers": ["local", "global"] * 6, "attention_types": None}
    model = read(GPT_NEO, **alone)
    assert model.pattern == ("window_256", "full") and read(GPT_NEO).pattern == ("full", "window_256")
    assert read(GPT_NEO, attention_layers=None) == read(GPT_NEO)


def test_the_number_of_experts_has_two_names_of_which_the_later_wins():
    """As attribute_map of `transformers` has it."""
    for config, names in ((MIXTRAL, ("num_local_experts", "num_experts")), (OLMOE, ("num_experts", "num_local_experts"))):
        model = read(config, **dict(zip(names, (64, 32), strict=True)))
        assert model.blocks["main"].feed_forward.moe.experts == 32


def test_gpt_neox_obeys_rotary_pct():
    assert rope(PYTHIA, rotary_pct=1.0, partial_rotary_factor=0.25).fraction == 1.0


def test_a_key_of_rope_scaling_that_transformers_does_not_read_is_named(capsys):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attn_factor": 0.878}
    assert rope(LLAMA_2, rope_scaling=scaling).factor == 4.0
    assert "warning: attn_factor of rope_scaling in config.json is not read" in capsys.readouterr().err


def test_sliding_layers_have_their_own_rope():
    blocks = read(GEMMA_3).blocks
    assert (blocks["window_512"].attention.rope.theta, blocks["full"].attention.rope.theta) == (1e4, 1e6)
    blocks = read(OLMO_3).blocks
    scalings = blocks["window_4096"].attention.rope.scaling, blocks["full"].attention.rope.scaling
    assert scalings == ("none", "yarn")


def test_the_balance_loss_and_the_jitter_of_a_config_are_those_of_training():
    moe = read(MIXTRAL, router_jitter_noise=0.25).blocks["main"].feed_forward.moe
    assert (moe.balance_loss, moe.jitter) == (0.02, 0.25)
    assert read(OLMOE).blocks["main"].feed_forward.moe.balance_loss == 0.01
