"""Folders of models with an encoder and a decoder: written and read back bit for bit, and what is refused.
tests/parity/test_seq2seq.py compares them with `transformers`."""

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import xfresearch as xf
from tests.contracts.variants import random_params
from tests.interop.edits import edit_config, edit_tensors
from tests.interop.folders import assert_same_tensors, tensors
from tests.interop.record import BEAMS, CONTINUATION, PAIRS, RECORDED, SOURCES, sources
from tests.tiny_runs import tiny_config
from tests.tolerances import TOLERANCE, relative_error
from xfresearch.data.tokenizers import ByteTokenizer
from xfresearch.data.tokenizers.special_tokens import read
from xfresearch.interop.differences import differences
from xfresearch.interop.exporting import choose, missing
from xfresearch.interop.families import get_family
from xfresearch.loading.generating import generated
from xfresearch.loading.language_model import LanguageModel
from xfresearch.models.sampling import Beams
from xfresearch.models.sources import padded

KIND = "blocks__main__feed_forward__kind"
V1_1 = {f"model__{KIND}": "swiglu", f"model__stacks__encoder__{KIND}": "swiglu", "model__depth": 3}
V1_1 |= {"model__tie_embeddings": False, "model__head_scale": "none"}
MODELS = {
    "t5": ("t5", {}, "t5"),
    "t5, v1.1": ("t5", V1_1, "t5"),
    "bart": ("bart", {}, "bart"),
    "bart, a bias of the logits": ("bart", {"model__head_bias": True}, "bart"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    written = {}
    for name, (config, changes, family) in MODELS.items():
        run = tiny_config(config, **changes)
        lm = LanguageModel(run.model, random_params(run.model), ByteTokenizer(), run)
        folder = tmp_path_factory.mktemp("models") / "out"
        assert lm.export_hf(folder) == family
        written[name] = lm, folder
    return written


@pytest.mark.parametrize("name", PAIRS)
def test_a_recorded_folder_computes_what_transformers_does_and_is_written_again(name, tmp_path):
    """Logits, and the texts of a beam search, in which BART's first and last tokens are forced."""
    lm, expected = xf.load(RECORDED / name), load_file(RECORDED / f"{name}.safetensors")
    settings, source = read(RECORDED / name), padded(sources(name))
    assert 0.5 < np.abs(expected["logits"]).max() < 50
    assert relative_error(lm(expected["tokens"], source=source), expected["logits"]) < TOLERANCE["float32"]
    tokenizer = SimpleNamespace(stops=settings.stops, vocab_size=lm.config.vocab_size, forced=settings.forced)
    start = [[settings.decoder_start]] * len(SOURCES)
    chunks = generated(lm.config, lm.params, tokenizer, start, source, CONTINUATION, Beams(BEAMS, 1.0), 0, {})
    found = [sum(texts, []) for texts in zip(*chunks, strict=True)]
    assert found == [[token for token in text if token >= 0] for text in expected["beams"].tolist()]
    assert lm.export_hf(tmp_path / "out") == name
    assert_same_tensors(tmp_path / "out", RECORDED / name)


def copy_of(folders: dict, name: str, tmp_path):
    lm, _ = folders[name]
    lm.export_hf(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_read_as_it_was_written(folders, name, tmp_path):
    lm, folder = folders[name]
    again = xf.load(folder)
    assert differences(again.config, lm.config) == []
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    assert (again.run.source_length, again.run.data.objective.kind) == (64, "seq2seq")
    assert again.run.data.corpus == ("translation",)  # so that every command has data
    assert again.tokenizer.decoder_start == lm.tokenizer.decoder_start
    again.export_hf(tmp_path / "again")
    expected, result = tensors(folder), tensors(tmp_path / "again")
    assert result.keys() == expected.keys()
    assert all(np.array_equal(result[each], expected[each]) for each in expected)


def test_the_tensors_of_both_stacks_have_the_names_of_transformers(folders):
    names = tensors(folders["t5, v1.1"][1]).keys()
    gated = "DenseReluDense.wi_1.weight"
    assert {f"encoder.block.1.layer.1.{gated}", f"decoder.block.2.layer.2.{gated}", "lm_head.weight"} <= names
    assert "encoder.block.2.layer.0.SelfAttention.q.weight" not in names
    assert "decoder.block.0.layer.2.DenseReluDense.wi.weight" in tensors(folders["t5"][1])
    bias = tensors(folders["bart"][1])["final_logits_bias"]
    assert bias.shape == (1, 257) and not bias.any() and not folders["bart"][0].config.head_bias


def test_a_head_of_its_own_is_known_by_its_tensor(folders, tmp_path):
    """`transformers` 5 writes tie_word_embeddings=True in any case, and the factor of v1.0 as scale_decoder_outputs."""
    folder = copy_of(folders, "t5, v1.1", tmp_path)
    edit_config(folder, tie_word_embeddings=True)
    assert not xf.load(folder).config.tie_embeddings
    edit_config(folder, tie_word_embeddings=False, scale_decoder_outputs=None)
    edit_tensors(folder, lambda stored: stored.pop("lm_head.weight"))
    config = xf.load(folder).config
    assert config.tie_embeddings and config.head_scale == "none"


def test_a_missing_bias_of_the_logits_is_0_and_copies_of_the_embedding_are_accepted(folders, tmp_path):
    folder = copy_of(folders, "bart", tmp_path)

    def early(stored):
        del stored["final_logits_bias"]
        stored |= {f"model.{stack}.embed_tokens.weight": stored["model.shared.weight"] for stack in ("encoder", "decoder")}

    edit_tensors(folder, early)
    assert not xf.load(folder).config.head_bias
    edit_tensors(folder, lambda stored: stored["model.encoder.embed_tokens.weight"].__setitem__((3, 1), 5.0))
    with pytest.raises(xf.UserError, match="model.shared.weight differ: a stack with a table of its own is not supported$"):
        xf.load(folder)


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh' is not allowed: it must be one of "),
        ("t5", {"dense_act_fn": "gelu"}, "dense_act_fn='gelu' is not allowed: feed_forward_proj says 'relu'"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder=False is not allowed"),
        ("t5", {"relative_attention_max_distance": 9}, "relative_attention_max_distance=9 is not allowed"),
        ("t5", {"num_decoder_layers": 99}, "num_decoder_layers=99 is more than the files have tensors"),
        ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings=False is not allowed"),
        ("bart", {"activation_function": "tanh"}, "activation_function='tanh' is not allowed"),
        ("bart", {"encoder_attention_heads": 3}, "encoder_attention_heads=3"),
    ],
)
def test_a_value_that_is_not_obeyed_is_refused(folders, name, changes, words, tmp_path):
    folder = copy_of(folders, name, tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(xf.UserError, match=words) as caught:
        xf.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config, changes, words",
    [
        ("t5", {"model__blocks__main__cross_attention__query": "identity"}, "cross_attention.query='identity'"),
        ("t5", {"model__stacks__encoder__causal": True}, "stacks.encoder.causal=True"),
        ("t5", {"model__stacks__encoder__embedding": "own"}, "stacks.encoder.embedding='own'"),
        ("bart", {"model__stacks__encoder__blocks__main__attention__bias": "()"}, "encoder.layers.0.attention.bias=()"),
        ("vanilla_2017", {}, "position='sinusoidal'"),
    ],
)
def test_a_model_that_no_family_can_express_is_refused(config, changes, words):
    with pytest.raises(xf.UserError, match="no family can express this model") as caught:
        choose(tiny_config(config, **changes).model)
    assert words in str(caught.value)


def test_a_refusal_names_five_options_and_counts_the_others():
    own = tiny_config("vanilla_2017").model
    with pytest.raises(xf.UserError) as caught:
        choose(own)
    words = re.fullmatch(r".* from bart in (\S+) \(.*\) and in (.*) and (\d+) more", str(caught.value))
    assert words
    first, others, more = words.groups()
    assert first == "position='sinusoidal'" and len(others.split(", ")) == 4
    differing = {each.field for each in missing(get_family("bart"), own) if not each.follows}
    assert len(differing) == 5 + int(more) and {*others.split(", ")} < differing


def test_special_ids_are_written_for_a_decoder(folders):
    """Without them `transformers` would start from the family's default id, and force BART's last token."""
    config = json.loads((folders["bart"][1] / "config.json").read_text())
    assert config["decoder_start_token_id"] == config["eos_token_id"] == 256 and config["forced_eos_token_id"] is None
